"""Who is waiting for what a function returns: the only sign of what libraries do not tell those that they call."""

import sys
from collections.abc import Iterator
from types import FrameType


def callers() -> Iterator[tuple[str, str]]:
    """Modules and functions on the stack, from the caller of the function that asks outwards."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        frame = frame.f_back
