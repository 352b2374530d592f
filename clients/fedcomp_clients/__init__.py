"""The client side of fedcomp: a mod for Flower's ClientApp. Needs flwr and numpy, never torch."""

from fedcomp_clients.downlink import FileModelCache, MemoryModelCache, ModelCache
from fedcomp_clients.mod import CompressMod, compress_mod
from fedcomp_clients.state import FileStore, MemoryStore, StateStore

__all__ = [
    "CompressMod",
    "FileModelCache",
    "FileStore",
    "MemoryModelCache",
    "MemoryStore",
    "ModelCache",
    "StateStore",
    "compress_mod",
]
