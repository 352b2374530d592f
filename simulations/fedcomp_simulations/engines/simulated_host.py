"""The process in which Flower's simulation runs: serves one order after the other until it is told to stop.

python -m fedcomp_simulations.engines.simulated_host FOLDER CLIENTS CPUS CPUS_PER_CLIENT PARENT
"""

import os
import sys
import threading
import time
from pathlib import Path

import ray
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedcomp_simulations.engines.clients import ORDER, OrderedClient, TextInFile
from fedcomp_simulations.engines.orders import Order, carry_out

STOP = "stop"
"""File that ends the process after the run at hand."""

_POLL_S = 0.05
_STORE_BYTES = 200_000_000


def main(folder: Path, clients: int, cpus: int, client_cpus: int, parent: int) -> None:
    """Start Ray and serve."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        last = ""
        while not (folder / STOP).exists():
            text = _text(folder / ORDER)
            if text != last:
                carry_out(Order.from_text(text), grid, context)
                last = text
            time.sleep(_POLL_S)

    ray.init(
        num_cpus=cpus, include_dashboard=False, object_store_memory=_STORE_BYTES, log_to_driver=False,
        _temp_dir=str(folder / "ray"),
    )  # fmt: skip
    try:
        app = OrderedClient(TextInFile(folder / ORDER))
        run_simulation(server, app, clients, backend_config={"client_resources": {"num_cpus": client_cpus}})
    finally:
        ray.shutdown()


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return ""


def _end_with(parent: int) -> None:
    """End when whoever started us was killed: nobody else would."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
