"""The console entry `fedcomp-client`: check a device, and train a bundle on local data.

This file imports only what every Python has, so that a broken installation can still be told about.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

EXIT_ERROR = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130  # what shells report for Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; a mistake of the user is explained in one line."""
    try:
        told = _parser().parse_args(arguments)
        if told.command == "doctor":
            return _doctor(told)
        return _run(told)
    except SystemExit as exit_:  # help, or a mistake in the arguments
        return exit_.code if isinstance(exit_.code, int) else EXIT_MISTAKE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("fedcomp", "fedcomp_clients"):  # our own fault, not a package that was left out
            raise
        return _say(f'{missing} is not installed; run: pip install "fedcomp[client]"')


def _doctor(told: argparse.Namespace) -> int:
    from fedcomp_clients.doctor import examine

    findings = []
    for finding in examine(told.bundle, told.state_dir, threads=told.threads):
        print(finding.line(), flush=True)
        findings.append(finding)
    bad = sum(not finding.ok for finding in findings)
    print(f"{bad} of {len(findings)} checks failed" if bad else "this device is ready")
    return EXIT_ERROR if bad else 0


def _run(told: argparse.Namespace) -> int:
    from fedcomp.errors import FedcompError
    from fedcomp_clients.local import train

    try:
        for line in train(told):
            print(line, flush=True)
    except FedcompError as error:
        return _say(str(error))
    return 0


class _Parser(argparse.ArgumentParser):
    """One that explains mistakes in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_MISTAKE, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fedcomp-client", description="Check a device, or train a bundle on it.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{doctor,run}")
    doctor = commands.add_parser("doctor", help="check whether this device can train and upload")
    doctor.add_argument("--bundle", type=Path, help="bundle to time a training step with; default: a tiny one")
    doctor.add_argument("--state-dir", type=Path, help="default: FEDCOMP_STATE_DIR, else below FLWR_HOME")
    doctor.add_argument("--threads", type=int, default=1, help="threads of an operator (%(default)s)")
    run = commands.add_parser("run", help="train a bundle on .npy files of this device")
    run.add_argument("bundle", type=Path, help="folder of the bundle")
    run.add_argument("--x", type=Path, required=True, help=".npy file of samples")
    run.add_argument("--y", type=Path, required=True, help=".npy file of targets")
    run.add_argument("--test-x", type=Path, help=".npy file of samples to evaluate on")
    run.add_argument("--test-y", type=Path, help=".npy file of targets to evaluate on")
    run.add_argument("--epochs", type=int, default=1, help="passes over the data (%(default)s)")
    run.add_argument("--batch-size", type=int, default=32, help="samples of a step (%(default)s)")
    run.add_argument("--lr", type=float, default=0.1, help="learning rate (%(default)s)")
    run.add_argument("--seed", type=int, default=0, help="of the order of samples and of dropout (%(default)s)")
    run.add_argument("--accumulate", type=int, default=1, help="pieces that a batch is computed in (%(default)s)")
    run.add_argument("--clip-norm", type=float, help="length that gradients are shortened to")
    run.add_argument("--single", default="merge", help="a sample left over: merge, skip or keep (%(default)s)")
    run.add_argument("--threads", type=int, default=1, help="threads of an operator (%(default)s)")
    run.add_argument("--start", type=Path, help=".npz file to start from, as --out writes it")
    run.add_argument("--out", type=Path, help=".npz file for the trained model")
    return parser


def _say(message: str) -> int:
    print(f"fedcomp-client: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_MISTAKE


if __name__ == "__main__":
    sys.exit(main())
