"""What a step costs on a device, onnxruntime against torch, for each family of models.

    python -m fedcomp_simulations.bench.training [FAMILY ...]

Exports each model, then trains it on random samples in two processes of their own: a batch of 32, one thread, SGD with
momentum 0.9. Times are the shortest of 12 passes over 8 batches, per batch. Needs the extras export and simulation.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from fedcomp_clients.export import SGD, export_training_bundle
from fedcomp_clients.manifest import TRAIN
from fedcomp_simulations.bench.families import NAMES, family
from fedcomp_simulations.bench.steps import BATCH, STEPS

WIDTH = 120


@dataclass(frozen=True)
class Measured:
    """A step of one engine."""

    step_ms: float
    peak_bytes: int
    loaded: list[str]


@dataclass(frozen=True)
class TrainingRow:
    """A family: its training graph, and a step of either engine."""

    family: str
    parameters: int
    nodes: int
    graph_bytes: int
    export_s: float
    difference: float
    onnxruntime: Measured
    torch: Measured


def measure_training(name: str) -> TrainingRow:
    """Export a family and measure it. Raises ExportError if the export fails its check."""
    given = family(name, 8)
    with tempfile.TemporaryDirectory() as scratch:
        folder, data = Path(scratch, "bundle"), Path(scratch, "data.npz")
        start = time.perf_counter()
        made = export_training_bundle(given.model, given.loss, (given.x, given.y), folder, optimizer=SGD(0.9))
        took = time.perf_counter() - start
        samples = family(name, BATCH * STEPS, seed=1)
        np.savez(data, x=samples.x.numpy(), y=samples.y.numpy())
        found = made.manifest.check
        return TrainingRow(
            name,
            given.parameters,
            made.nodes,
            made.manifest.files[TRAIN].bytes,
            took,
            found.largest_difference if found else float("nan"),
            _run("onnxruntime", str(folder), data),
            _run("torch", name, data),
        )


def _run(engine: str, what: str, data: Path) -> Measured:
    command = [sys.executable, "-W", "ignore", "-m", "fedcomp_simulations.bench.steps", engine, what, str(data)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Measured(**json.loads(done.stdout))


def training_table(rows: Sequence[TrainingRow]) -> Table:
    """The rows as a table; ratios are onnxruntime's share of torch's."""
    table = Table(title="A training step, onnxruntime against torch")
    headings = (
        "family",
        "parameters",
        "operators",
        "graph kB",
        "export s",
        "difference",
        "ms",
        "torch",
        "ratio",
        "MB",
        "torch",
        "ratio",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "family" else "right")
    for row in rows:
        ours, theirs = row.onnxruntime, row.torch
        table.add_row(
            row.family, f"{row.parameters:,}", f"{row.nodes:,}", f"{row.graph_bytes / 1000:.1f}", f"{row.export_s:.1f}",
            f"{row.difference:.0e}", f"{ours.step_ms:.2f}", f"{theirs.step_ms:.2f}",
            f"{ours.step_ms / theirs.step_ms:.2f}", f"{ours.peak_bytes / 1e6:.0f}", f"{theirs.peak_bytes / 1e6:.0f}",
            f"{ours.peak_bytes / theirs.peak_bytes:.2f}",
        )  # fmt: skip
    return table


def main(names: Sequence[str]) -> None:
    """Measure and print."""
    rows = []
    for name in names or NAMES:
        rows.append(measure_training(name))
        row = rows[-1]
        print(f"{name}: {row.onnxruntime.step_ms:.2f} ms against {row.torch.step_ms:.2f}", file=sys.stderr)
    Console(width=WIDTH).print(training_table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
