"""A ClientApp for devices: it trains the bundle and the .npy files that the device's node config names."""

from pathlib import Path

import numpy as np
from fedcomp_clients import make_client_app
from flwr.app import Context


def load_data(context: Context) -> tuple[np.ndarray, np.ndarray]:
    """Memory-mapped inputs, of which only batches are read, and their labels."""
    data = Path(context.node_config["data"])
    return np.load(data / "x.npy", mmap_mode="r"), np.load(data / "y.npy")


app = make_client_app(lambda context: context.node_config["bundle"], load_data)
