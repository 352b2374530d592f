"""The two halves of the app that SuperLink and SuperNodes run: the order is in the run's configuration."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedcomp_simulations.engines.clients import OrderedClient, text_in_config
from fedcomp_simulations.engines.orders import Order, carry_out

server = ServerApp()
client = OrderedClient(text_in_config)


@server.main()
def _serve(grid: Grid, context: Context) -> None:
    if not carry_out(Order.from_text(text_in_config(context)), grid, context):
        raise RuntimeError("the run has failed, and has told whoever waits for it why")
