"""The environment of Flower's processes, and the config.toml of a FLWR_HOME."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from fedcomp.errors import ConfigError
from fedcomp_simulations.deployment.process import LOOPBACK, program_path

UserValue = bool | float | int | str

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
}
"""Keeps Flower's processes from looking for anything outside of this machine, and their logs up to date."""

_POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"


def flower_environment(home: Path, state: Path | None, extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, changed for one of Flower's.

    Args:
        home: its FLWR_HOME.
        state: its FEDCOMP_STATE_DIR, where a client keeps residuals and models; None: as in this process.
        extra: what wins over all else.
    """
    base = dict(os.environ) | QUIET | {"PATH": program_path(os.environ), "FLWR_HOME": str(home)}
    for name in ("NO_PROXY", "no_proxy"):  # Flower's HTTP client would send loopback to a proxy too
        base[name] = ",".join(filter(None, [base.get(name, ""), LOOPBACK]))
    base.setdefault(_POLL, "0.2")  # seconds that an app waits at most for its process to be started
    if state is not None:
        base["FEDCOMP_STATE_DIR"] = str(state)
    return base | dict(extra)


def write_federation(home: Path, name: str, address: str) -> Path:
    """Write the config.toml of a FLWR_HOME with one SuperLink that is spoken to without TLS. Returns its path."""
    home.mkdir(parents=True, exist_ok=True)
    path = home / "config.toml"
    path.write_text(f'[superlink]\ndefault = "{name}"\n\n[superlink.{name}]\naddress = "{address}"\ninsecure = true\n')
    return path


def as_toml(values: Mapping[str, UserValue]) -> dict[str, str]:
    """Each value as TOML. Raises ConfigError for what Flower's configuration cannot hold."""
    for key, value in values.items():
        if not isinstance(value, bool | int | float | str):
            raise ConfigError(f"config {key!r}: expected a bool, int, float or str, got {type(value).__name__}")
    return {key: json.dumps(value) for key, value in values.items()}


def node_config(values: Mapping[str, UserValue]) -> str:
    """Key/value pairs as `flower-supernode --node-config` reads them. Raises ConfigError for what it cannot read."""
    written = as_toml(values)
    for key, text in written.items():
        if any(c in key for c in " =\"'") or '"' in text[1:-1] or "\\" in text:
            raise ConfigError(f"node config {key}={text}: keys take no spaces, values no quotes and no backslashes")
    return " ".join(f"{key}={text}" for key, text in written.items())
