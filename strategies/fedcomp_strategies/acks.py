"""Which upload of each client the server used last, so that clients know which of their memories counts."""

import logging
from collections.abc import Collection
from heapq import nlargest

log = logging.getLogger("fedcomp")

MOST_ORPHANS = 64


class Acknowledgements:
    """The last round in which an upload of each node was handed to the inner strategy.

    A SuperNode without a registered key gets another node id when it restarts. Clients therefore introduce themselves
    by a number of their own (their partition), and nodes that the server does not know are told the rounds of those
    numbers whose nodes are gone: one of them may be theirs.

    A number is what a client says, so it may be anybody's. It never changes what another node is told: a number of a
    node that is there stays with that node, and one of a node that is gone passes on while that node, should it come
    back, is still told its own round.
    """

    def __init__(self) -> None:
        self._rounds: dict[int, int] = {}
        self._nodes: dict[int, int] = {}  # by number
        self._present: set[int] = set()
        self._silent: set[int] = set()

    def told(self, node: int) -> int | None:
        """The last round of which an upload of the node was used; None for a node without one."""
        return self._rounds.get(node)

    def orphans(self, present: Collection[int]) -> list[int]:
        """[number, round, ...] of clients whose nodes are gone or silent, those seen last first, at most 64."""
        self._present = set(present) - self._silent
        gone = ((self._rounds[node], number) for number, node in self._nodes.items() if node not in self._present)
        return [value for round_, number in nlargest(MOST_ORPHANS, gone) for value in (number, round_)]

    def former(self, node: int, number: int | None) -> int | None:
        """The node, gone by now, whose successor a node says that it is; None: it is not one's."""
        before = None if number is None or node in self._rounds else self._nodes.get(number)
        return None if before in self._present else before

    def accept(self, node: int, round: int, number: int | None = None) -> None:
        """An upload of the node was used. Perhaps it introduces itself by a number, which only a new node needs to."""
        if number is not None and node not in self._rounds:
            self._introduce(node, number)
        self._rounds[node] = round
        self._present.add(node)
        self._silent.discard(node)

    def miss(self, node: int) -> None:
        """The node was asked and sent nothing usable: Flower goes on listing a dead node for a while."""
        self._silent.add(node)

    def _introduce(self, node: int, number: int) -> None:
        """Make a new node the successor of the one that had its number, if that is gone."""
        before = self._nodes.get(number)
        if before in self._present:
            log.warning(
                "node %d says that it is client %d (its partition-id), as node %d does; both go on, but if node %d "
                "restarts under another id, its memory is lost: give every device a partition-id of its own",
                node, number, before, node,
            )  # fmt: skip
        else:
            self._nodes[number] = node
