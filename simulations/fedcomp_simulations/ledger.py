"""Who uploaded how much: the bytes of a run, summed from what the strategy measured."""

from dataclasses import dataclass

from fedcomp_strategies import RoundTraffic


@dataclass(frozen=True)
class Ledger:
    """The train rounds of one run and their sums."""

    rounds: tuple[RoundTraffic, ...]

    @property
    def bytes_up(self) -> int:
        """Payload of all uploads."""
        return sum(entry.bytes_up for entry in self.rounds)

    @property
    def bytes_down(self) -> int:
        """Payload of all messages to the clients."""
        return sum(entry.bytes_down + entry.bytes_down_evaluate for entry in self.rounds)

    @property
    def messages(self) -> int:
        """Number of train messages to the clients."""
        return sum(entry.messages for entry in self.rounds)

    @property
    def uploads(self) -> int:
        """Number of uploads that arrived."""
        return sum(entry.uploads for entry in self.rounds)

    @property
    def failures(self) -> int:
        """Number of clients that were asked and delivered nothing usable."""
        return sum(entry.failures for entry in self.rounds)

    def bytes_up_until(self, last_round: int) -> int:
        """Payload of all uploads up to and including a round."""
        return sum(entry.bytes_up for entry in self.rounds if entry.round <= last_round)
