"""A client without torch: a bundle and data that lie on the device, and a witness of what its process has loaded."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from fedcomp_clients import make_client_app
from fedcomp_clients.app import Samples

WITNESS = "loaded.json"


def folder(context: Context) -> Path:
    """Where this device keeps its files."""
    return Path(str(context.node_config["folder"]))


def load_data(context: Context) -> Samples:
    """Memory-mapped samples and their labels."""
    return np.load(folder(context) / "x.npy", mmap_mode="r"), np.load(folder(context) / "y.npy")


def witness(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Write down, once the work is done, whether torch was loaded or could be, and whose Python this is."""
    reply = call_next(message, context)
    told: dict[str, object] = {
        "loaded": sorted({"torch", "onnx", "onnxruntime"} & set(sys.modules)),
        "prefix": sys.prefix,
    }
    told["torch"] = find_spec("torch") is not None
    (folder(context) / WITNESS).write_text(json.dumps(told))
    return reply


app = make_client_app(lambda context: folder(context) / "bundle", load_data, outer_mods=[witness])
