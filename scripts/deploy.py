"""Run a Flower app on a SuperLink and SuperNodes of this machine, and stop them all: a template for a real deployment.

What happens here, in commands:

    flower-superlink --insecure --port 8000 --disable-runtime-dependency-installation
    FLWR_HOME=... FEDCOMP_STATE_DIR=... flower-supernode --insecure --superlink 127.0.0.1:8000 --port 9094 \\
        --node-config "partition-id=0 num-partitions=3"        (each with a FLWR_HOME, state and --port of its own)
    flwr run simulations/quickstart loopback --stream          ($FLWR_HOME/config.toml says where `loopback` is)

What changes on real machines:

  * One SuperLink on the server, one SuperNode on each device, each kept alive by the machine's own means (systemd,
    Docker). fedcomp is installed beside Flower on all of them.
  * TLS instead of --insecure: --ssl-certfile, --ssl-keyfile and --ssl-ca-certfile at the SuperLink, --root-certificates
    at the SuperNodes. With --enable-supernode-auth and --auth-supernode-private-key nodes keep their id when they
    restart.
  * Addresses: --host 0.0.0.0 at the SuperLink, its name and port at the SuperNodes and in config.toml, there with
    `root-certificates = "..."` instead of `insecure = true`.
  * Every device has a partition-id of its own: under it lies what feedback remembers, so that it survives a restart
    even under another id.
  * FEDCOMP_STATE_DIR on a disk that survives a restart (default $FLWR_HOME/fedcomp); FEDCOMP_STATE_BYTES limits it.
  * The timeout of a round, `timeout` of the quickstart: how long it waits for a device that has died. A few times what
    the slowest one takes.
"""

import argparse
import re
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from fedcomp import FedcompError
from fedcomp_simulations.deployment import Deployment

QUICKSTART = Path(__file__).parent.parent / "simulations" / "quickstart"
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}  # several nodes share this machine's cores
FAILED, INTERRUPTED = 1, 130


def main() -> int:
    """Deploy, run, stop. Returns the exit code."""
    options = parse()
    try:
        deploy(options)
    except FedcompError as error:
        print(f"deploy: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("deploy: interrupted, everything is stopped", file=sys.stderr)
        return INTERRUPTED
    return 0


def deploy(options: argparse.Namespace) -> None:
    """One run on fresh processes."""
    folder = options.folder or Path(tempfile.mkdtemp(prefix="fedcomp-deploy-"))
    config: dict[str, Any] = {"nodes": options.nodes} if options.app == QUICKSTART else {}
    print(f"logs, homes and states: {folder}")
    with Deployment(folder, ENVIRONMENT, options.port) as deployment:
        print(f"SuperLink on {deployment.address}: {deployment.log}")
        for partition in range(options.nodes):
            deployment.add_node({"partition-id": partition, "num-partitions": options.nodes}, wait=False)
        for node in deployment.nodes:
            print(f"SuperNode {node.connect()}: {node.log}", flush=True)
        deployment.run(options.app, config | options.run_config, options.timeout, show=show)
    print(f"the run has completed, everything is stopped; logs: {folder}")


def show(text: str) -> None:
    """Pass on what the ServerApp logs."""
    print(text, end="", flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--app", type=Path, default=QUICKSTART, help="folder of the app; default: the quickstart")
    parser.add_argument("--nodes", type=int, default=3, help="SuperNodes; default 3")
    parser.add_argument("--port", type=int, help="of the SuperLink; default: a free one")
    parser.add_argument(
        "--folder", type=Path, help="for logs, homes and states; default: a temporary one, which is kept"
    )
    parser.add_argument("--timeout", type=float, default=900, help="seconds for the whole run; default 900")
    parser.add_argument(
        "--run-config", type=toml, default={}, metavar="TOML", help='as in \'rounds=3 uplink="auto" budget="500 B"\''
    )
    options = parser.parse_args()
    if options.nodes < 1:
        parser.error(f"--nodes: expected at least 1, got {options.nodes}")
    return options


def toml(text: str) -> dict[str, Any]:
    """Key/value pairs on one line, or on several."""
    pairs: list[str] = re.findall(r"""[\w.-]+\s*=\s*(?:"[^"]*"|'[^']*'|\S+)""", text)
    try:
        return tomllib.loads("\n".join(pairs))
    except tomllib.TOMLDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected key=value pairs of TOML, got {text!r}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
