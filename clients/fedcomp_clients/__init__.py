"""The client side of fedcomp: a mod for Flower's ClientApp, and training from bundles. Never needs torch.

Names are imported when they are first used, so that training works without flwr and compression without onnxruntime.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedcomp_clients.app import initial_arrays, make_client_app
    from fedcomp_clients.bundle import Bundle, read_bundle
    from fedcomp_clients.downlink import FileModelCache, MemoryModelCache, ModelCache
    from fedcomp_clients.mod import CompressMod, compress_mod
    from fedcomp_clients.onnx_trainer import Evaluation, FitResult, OnnxTrainer
    from fedcomp_clients.state import FileStore, MemoryStore, StateStore

_HOMES = {
    "Bundle": "bundle",
    "CompressMod": "mod",
    "Evaluation": "onnx_trainer",
    "FileModelCache": "downlink",
    "FileStore": "state",
    "FitResult": "onnx_trainer",
    "MemoryModelCache": "downlink",
    "MemoryStore": "state",
    "ModelCache": "downlink",
    "OnnxTrainer": "onnx_trainer",
    "StateStore": "state",
    "compress_mod": "mod",
    "initial_arrays": "app",
    "make_client_app": "app",
    "read_bundle": "bundle",
}

__all__ = [
    "Bundle",
    "CompressMod",
    "Evaluation",
    "FileModelCache",
    "FileStore",
    "FitResult",
    "MemoryModelCache",
    "MemoryStore",
    "ModelCache",
    "OnnxTrainer",
    "StateStore",
    "compress_mod",
    "initial_arrays",
    "make_client_app",
    "read_bundle",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
