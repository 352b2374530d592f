"""The console entry `fedcomp`. This file imports nothing that an installation without extras lacks."""

import sys
from collections.abc import Sequence

EXIT_ERROR = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130  # what shells report for Ctrl-C

OWN = ("fedcomp", "fedcomp_clients", "fedcomp_simulations", "fedcomp_strategies")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; a mistake of the user is explained in one line."""
    try:
        from fedcomp_simulations import commands

        return commands.run(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in OWN:  # our own fault, not an extra that was left out
            raise
        return _say(f'{missing} is not installed; run: pip install "fedcomp[simulation]"', EXIT_MISTAKE)


def _say(message: str, code: int) -> int:
    print(f"fedcomp: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
