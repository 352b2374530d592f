"""One of the two clients of start_server.py: python start_client.py 0|1 [ADDRESS]."""

import sys

from flwr.client import start_client

from digits.client_app import FlowerClient
from digits.task import load_data

partition = int(sys.argv[1])
address = sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1:8080"
client = FlowerClient(*load_data(partition, 2), local_epochs=1)
start_client(server_address=address, client=client.to_client())
