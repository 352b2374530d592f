"""Finished runs in a folder, a file each, so that an interrupted sweep goes on where it was.

A run is the same whenever the same code makes it with the same settings; so its file may be used instead if it was made
with these settings, this code and these versions, all of which it names.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from fedcomp.errors import ConfigError
from fedcomp.monitor import TensorStats
from fedcomp_simulations import datasets
from fedcomp_simulations.config import to_config
from fedcomp_simulations.results import FORMAT, RunResult
from fedcomp_simulations.saving import write_text
from fedcomp_simulations.workers import Job

PACKAGES = ("fedcomp", "fedcomp_clients", "fedcomp_strategies", "fedcomp_simulations")
APART = (  # of fedcomp_simulations: what shows results, or has no part in making them
    "advise.py", "bench", "cli.py", "commands.py", "deploying.py", "deployment", "display.py", "exporting.py",
    "report", "simulating.py", "summary.py", "tables.py",
)  # fmt: skip


class RunStore:
    """Keeps runs in `folder/runs`.

    Args:
        engine, versions: what makes the runs.
        fresh: do not use what is there.
    """

    def __init__(self, folder: Path, engine: str, versions: Mapping[str, str], *, fresh: bool = False) -> None:
        self.folder = folder / "runs"
        self._made_by = {"format": FORMAT, "engine": engine, "versions": dict(versions), "code": code_digest()}
        self._fresh = fresh
        self._stamps: dict[str, object] = {}  # of data, when their runs were planned

    def load(self, job: Job) -> RunResult | None:
        """The run if it is there, whole, and made with the same settings by the same code; else None."""
        self._stamps.setdefault(job.experiment.dataset, datasets.stamp(job.experiment.dataset))
        if self._fresh:
            return None
        try:
            value = json.loads(self.path(job).read_text("utf-8"))
            if value["made_by"] != self._made_by or value["settings"] != settings_of(job):
                return None
            stats = tuple(TensorStats(**entry) for entry in value["stats"])
            return replace(RunResult.from_json(value["run"]), seconds=float(value["seconds"]), stats=stats)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None  # not there, or damaged: then it is made again (a ConfigError is a ValueError)

    def save(self, job: Job, run: RunResult) -> None:
        """Keep a run. Raises OSError if that cannot be done; then what was there is as it was.

        Raises ConfigError if the data have changed since the run was looked for: it may be made with either.
        """
        data = job.experiment.dataset
        if self._stamps.get(data, datasets.stamp(data)) != datasets.stamp(data):
            raise ConfigError(f"dataset {data!r} has changed while runs were made on it; run the same command again")
        content = {
            "made_by": self._made_by,
            "settings": settings_of(job),
            "seconds": round(run.seconds, 3),
            "stats": [asdict(entry) for entry in run.stats],
            "run": run.to_json(),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.path(job), json.dumps(content))

    def path(self, job: Job) -> Path:
        """Where a run is kept: its name says the method and the seed, and a digest all of its settings."""
        text = json.dumps([self._made_by["engine"], settings_of(job)], sort_keys=True)
        words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{job.task} {job.method.name}").strip("-")[:80]
        return self.folder / f"{words}-{job.seed}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"


def settings_of(job: Job) -> dict[str, Any]:
    """All that a run hangs on, as plain values."""
    return {
        "task": job.task,
        "experiment": to_config(job.experiment, skip=("name", "methods", "seeds")),
        "method": to_config(job.method),
        "seed": job.seed,
        "monitor": job.monitor,
        "data": datasets.fingerprint(job.experiment.dataset),
    }


@cache
def code_digest() -> str:
    """A digest of the installed code that runs hang on: whoever changes it does not get runs of the former code."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for name, text in sorted(_sources(files(package), package)):
            digest.update(f"{name}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()[:16]


def _sources(folder: Traversable, where: str) -> list[tuple[str, bytes]]:
    found = []
    for entry in folder.iterdir():
        path = f"{where}/{entry.name}"
        if where == "fedcomp_simulations" and entry.name in APART:
            continue
        if entry.is_dir():
            found += _sources(entry, path)
        elif entry.name.endswith(".py"):
            found.append((path, entry.read_bytes()))
    return found
