"""The ClientApp of engines in other processes: it is told the run with each message's context, not when it is made."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedcomp_clients import CompressMod, FileModelCache, FileStore
from fedcomp_simulations.apps import client_app
from fedcomp_simulations.engines.orders import Order

ORDER = "order"
"""Key of a run's configuration, and name of the file, with the text of an order."""


class OrderedClient(ClientApp):
    """Does what the client of the order's experiment does.

    Args:
        text_of: finds the text of the order of a message's run.
    """

    def __init__(self, text_of: Callable[[Context], str]) -> None:
        super().__init__()
        self._text_of = text_of

    def __call__(self, message: Message, context: Context) -> Message:
        """Have the client of the experiment answer."""
        return _client(self._text_of(context))(message, context)


@lru_cache(maxsize=2)
def _client(text: str) -> ClientApp:
    order = Order.from_text(text)
    exact = CompressMod(FileStore(precision="float32"), models=FileModelCache())  # as memory would keep it
    return client_app(order.experiment, order.seed, exact)


def text_in_config(context: Context) -> str:
    """The text in the configuration of the run."""
    return str(context.run_config[ORDER])


class TextInFile:
    """The text in a file of this machine, which holds one order after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, context: Context) -> str:
        """Read it."""
        del context
        return self.path.read_text("utf-8")
