"""Which upload of each client the server used last, so that clients know which of their memories counts."""

from collections.abc import Collection

MOST_ORPHANS = 64


class Acknowledgements:
    """The last round in which an upload of each node was handed to the inner strategy.

    A SuperNode without a registered key gets another node id when it restarts. Clients therefore introduce themselves
    by a number of their own (their partition), and nodes that the server does not know are told the rounds of those
    numbers whose nodes are gone: one of them may be theirs.
    """

    def __init__(self) -> None:
        self._rounds: dict[int, int] = {}
        self._numbers: dict[int, int] = {}  # node by number

    def told(self, node: int) -> int | None:
        """The last round of which an upload of the node was used; None for a node without one."""
        return self._rounds.get(node)

    def orphans(self, present: Collection[int]) -> list[int]:
        """[number, round, ...] of clients whose nodes are not present, those seen last first, at most 64."""
        gone = [(self._rounds[node], number) for number, node in self._numbers.items() if node not in present]
        return [value for round_, number in sorted(gone, reverse=True)[:MOST_ORPHANS] for value in (number, round_)]

    def accept(self, node: int, round: int, number: int | None = None) -> None:
        """An upload of the node was used. A number makes it the successor of the node that had it before."""
        if number is not None:
            before = self._numbers.get(number)
            if before is not None and before != node:
                del self._rounds[before]
            self._numbers = {n: k for n, k in self._numbers.items() if k != node} | {number: node}
        self._rounds[node] = round
