"""What this process keeps of the trainings that it took part in last, so that a long-lived one does not fill up."""

from collections import OrderedDict
from typing import Generic, TypeVar

MOST_TRAININGS = 8

T = TypeVar("T")


class Recent(Generic[T]):
    """Values by training and key, for the last 8 trainings that were used. Can be pickled."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, dict[str, T]] = OrderedDict()

    def get(self, training: str, key: str) -> T | None:
        """What was put there last; None: nothing, or it is forgotten. This is a use of the training."""
        kept = self._kept.get(training)
        if kept is None:
            return None
        self._kept.move_to_end(training)
        return kept.get(key)

    def put(self, training: str, key: str, value: T) -> None:
        """Keep a value. The training that was not used for longest is forgotten if there are too many."""
        self._kept.setdefault(training, {})[key] = value
        self._kept.move_to_end(training)
        while len(self._kept) > MOST_TRAININGS:
            self._kept.popitem(last=False)
