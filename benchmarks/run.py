"""Makes the tables of this folder again: runs its experiments and writes what came out under `results/`.

    python benchmarks/run.py                       # all of them: one to two hours on two cores
    python benchmarks/run.py mnist-mlp fedvqcs     # these
    python benchmarks/run.py --tables-only         # write the tables again from runs that are there

Runs are those of `fedcomp simulate benchmarks/NAME.toml --out OUT/NAME`: finished ones are kept there, and after an
interruption the same command goes on. Of each experiment `results/NAME.md` is the table and `results/NAME.json` what
it was made of; what the tables say is in README.md.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcomp import FedcompError
from fedcomp_simulations.commands import run as fedcomp
from fedcomp_simulations.results import Results, RunResult, load_results
from fedcomp_simulations.saving import write_text
from fedcomp_simulations.summary import Summary, format_bytes, summarize

FOLDER = Path(__file__).resolve().parent
RUNS = Path("results") / "benchmarks"
SHARE = 0.95  # of float32's accuracy
STEADY = 3  # evaluations, one after the other, whose mean must be there: a single one may be luck
MISTAKE = 2
HEADINGS = (
    "method",
    "accuracy %",
    "points against float32 (lowest, highest)",
    "of float32",
    "bytes per upload",
    "ratio",
    "bytes per download",
    f"uploaded until {100 * SHARE:.0f} % of float32",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = _options(arguments)
    for name in options.names or available():
        folder = options.out / name
        if not options.tables_only and (code := fedcomp(_command(name, folder, options.workers))):
            return code
        try:
            write_tables(name, load_results(folder / "results.json"), options.results, here=not options.tables_only)
        except FedcompError as error:
            print(f"benchmarks/run.py: {error}", file=sys.stderr)
            return MISTAKE
        print(f"table: {options.results / f'{name}.md'}")
    return 0


def _command(name: str, folder: Path, workers: int | None) -> list[str]:
    command = ["simulate", str(FOLDER / f"{name}.toml"), "--out", str(folder)]
    return [*command, "--workers", str(workers)] if workers is not None else command


def available() -> list[str]:
    """Names of the experiments in this folder."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def write_tables(name: str, results: Results, folder: Path, *, here: bool) -> None:
    """Write NAME.md and NAME.json.

    Args:
        here: the runs were made on this machine just now; else the machine is the one that NAME.json names already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{name}.json"
    known = json.loads(kept.read_text("utf-8"))["machine"] if kept.is_file() and not here else None
    machine = known or machine_line(results.versions)
    write_text(kept, json.dumps(compact(results, machine), indent=None, separators=(",", ":")) + "\n")
    write_text(folder / f"{name}.md", page(name, results, machine))


def page(name: str, results: Results, machine: str) -> str:
    """The table as Markdown, with what it takes to repeat it."""
    seeds = ", ".join(str(seed) for seed in sorted({run.seed for run in results.runs}))
    settings = ", ".join(f"{key} {value}" for key, value in _told(results.tasks[0].settings).items())
    lines = [
        f"# {name}",
        "",
        f"{results.parameters:,} parameters, {results.clients_per_round} of {results.clients} clients a round, "
        f"{results.runs[0].rounds} rounds; {settings}.",
        "",
        f"* Experiment: `benchmarks/{name}.toml`",
        f"* Command: `python benchmarks/run.py {name}`",
        f"* Seeds: {seeds}",
        f"* Machine: {machine}",
        "",
        *table(results),
    ]
    return "\n".join([*lines, *_notes(results)]) + "\n"


def table(results: Results) -> list[str]:
    """The lines of the table: a row a method, in the order of the experiment's file."""
    groups = results.by_method()
    summaries = summarize(results)
    reference = next((each for each in summaries if each.method.uncompressed), None)
    target = SHARE * reference.accuracy if reference else None
    rows = [_row(each, reference, until(groups[each.method], target)) for each in summaries]
    marks = ["---", *["---:"] * (len(HEADINGS) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (HEADINGS, marks, *rows)]


def until(runs: Sequence[RunResult], target: float | None) -> float | None:
    """Bytes that all clients uploaded, mean over seeds, until the mean accuracy over seeds was at the target.

    It is there once the mean of STEADY evaluations, one after the other, is; None: never, or there is no target.
    """
    if target is None:
        return None
    curves = zip(*(run.accuracy_curve for run in runs), strict=True)
    curve = [fmean(accuracy for _, _, accuracy in points) for points in curves]
    window = min(STEADY, len(curve))
    for last in range(window - 1, len(curve)):
        if fmean(curve[last - window + 1 : last + 1]) >= target:
            return fmean(run.accuracy_curve[last][1] for run in runs)
    return None


def compact(results: Results, machine: str) -> dict[str, Any]:
    """What the table was made of, without curves and clients: plain values."""
    return {
        "experiment": results.experiment,
        "machine": machine,
        "versions": dict(results.versions),
        "parameters": results.parameters,
        "runs": [
            {
                "method": run.method.name,
                "seed": run.seed,
                "accuracy_final": round(run.accuracy_final, 6),
                "payload_bytes_up": run.payload_bytes_up,
                "payload_bytes_down": run.payload_bytes_down,
                "uploads": run.uploads,
                "failures": run.failures,
            }
            for run in results.runs
        ],
    }


def machine_line(versions: Mapping[str, str]) -> str:
    """Processor, cores, system, and the versions that the runs were made with."""
    cores = os.cpu_count() or 1
    tools = ", ".join(f"{tool} {versions[tool]}" for tool in ("python", "torch", "numpy", "flwr", "fedcomp"))
    return f"{_processor()}, {cores} core{'s' * (cores > 1)}, {_system()}; {tools}"


def _row(summary: Summary, reference: Summary | None, reached: float | None) -> list[str]:
    spread = "" if summary.accuracy_spread is None else f" ± {100 * summary.accuracy_spread:.1f}"
    return [
        summary.method.name.replace("|", "\\|"),
        f"{100 * summary.accuracy:.1f}{spread}",
        _points(summary.points) if summary.points and not summary.method.uncompressed else "",
        f"{100 * summary.accuracy / reference.accuracy:.1f} %" if reference else "",
        f"{summary.payload_per_upload:,.0f}",
        f"{summary.ratio:,.0f}" if summary.ratio else "",
        f"{summary.payload_per_download:,.0f}",
        "-" if reached is None else format_bytes(reached),
    ]


def _points(points: Sequence[float]) -> str:
    mean, low, high = (f"{round(value, 1) + 0.0:+.1f}" for value in (fmean(points), min(points), max(points)))
    return f"{mean} ({low}, {high})"  # the + 0.0 turns -0.0 into 0.0


def _told(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the task that say what is learned from which data, and how."""
    of_partition = {"dirichlet": "alpha", "quantity": "alpha", "shards": "shards_per_client"}
    keys = ["dataset", "model", "hidden", "partition", of_partition.get(settings["partition"], "")]
    keys += ["local_epochs", "batch", "lr", "momentum", "clip_norm"]
    return {key.replace("_", " "): settings[key] for key in keys if settings.get(key) not in (None, 0, "inf")}


def _notes(results: Results) -> list[str]:
    """What went wrong in runs, if anything did: which method, and how often."""
    failures = {
        method.name: sum(run.failures for run in runs)
        for method, runs in results.by_method().items()
        if any(run.failures for run in runs)
    }
    warned = {
        method.name: next(warning for run in runs for warning in run.warnings)
        for method, runs in results.by_method().items()
        if any(run.warnings for run in runs)
    }
    notes = [f"* {name}: {count:,} uploads failed" for name, count in failures.items()]
    notes += [f"* {name} warned: {' '.join(text.split())}" for name, text in warned.items()]
    return ["", *notes] if notes else []


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/run.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(available())}; default all")
    parser.add_argument("--workers", type=int, help="worker processes; default 2, or 1 on one processor")
    parser.add_argument("--out", type=Path, default=RUNS, help=f"where runs are kept; default {RUNS}")
    parser.add_argument("--results", type=Path, default=FOLDER / "results", help="where tables go")
    parser.add_argument("--tables-only", action="store_true", help="run nothing, write the tables again")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in available():
            parser.error(f"unknown experiment {name!r}; available: {', '.join(available())}")
    return options


if __name__ == "__main__":
    sys.exit(main())
