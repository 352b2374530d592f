"""What ends this process must end what it has started, too: those are processes in groups of their own."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextlib.contextmanager
def as_interrupts() -> Iterator[None]:
    """Inside, being told to end (`kill`, a closed terminal) is like Ctrl-C; only in the main thread, as signals are."""
    with _handling(dict.fromkeys(_ENDING, _interrupt)):
        yield


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, neither Ctrl-C nor being told to end has an effect: for the few seconds in which processes are killed."""
    with _handling(dict.fromkeys((signal.SIGINT, *_ENDING), signal.SIG_IGN)):
        yield


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _handling(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in handlers}
    try:
        for number, handler in handlers.items():
            if before[number] is not signal.SIG_IGN:  # such as SIGHUP under nohup
                signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
