"""The server side of fedcomp: strategies that ask for compressed updates and decode them."""

from fedcomp_strategies.compressed import Compressed
from fedcomp_strategies.ready import (
    CompressedFedAdagrad,
    CompressedFedAdam,
    CompressedFedAvg,
    CompressedFedAvgM,
    CompressedFedProx,
    CompressedFedYogi,
)
from fedcomp_strategies.settings import settings
from fedcomp_strategies.traffic import RoundTraffic

__all__ = [
    "Compressed",
    "CompressedFedAdagrad",
    "CompressedFedAdam",
    "CompressedFedAvg",
    "CompressedFedAvgM",
    "CompressedFedProx",
    "CompressedFedYogi",
    "RoundTraffic",
    "settings",
]
