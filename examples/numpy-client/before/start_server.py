"""The same without SuperLink and SuperNodes, for two clients: python start_server.py [ADDRESS]."""

import sys

from flwr.common import ndarrays_to_parameters
from flwr.server import ServerConfig, start_server
from flwr.server.strategy import FedAvg

from digits.server_app import weighted_average
from digits.task import get_initial_weights

strategy = FedAvg(
    initial_parameters=ndarrays_to_parameters(get_initial_weights()),
    evaluate_metrics_aggregation_fn=weighted_average,
)
address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8080"
start_server(server_address=address, config=ServerConfig(num_rounds=3), strategy=strategy)
