"""The server side of fedcomp: strategies that ask for compressed updates and decode them."""

from fedcomp_strategies.compressed import Compressed
from fedcomp_strategies.traffic import RoundTraffic

__all__ = ["Compressed", "RoundTraffic"]
