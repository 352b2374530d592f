"""What `fedcomp simulate` does: runs a study with live progress, saves the results and shows them."""

import json
import sys
from pathlib import Path

from rich.console import Console

from fedcomp.errors import FedcompError
from fedcomp_simulations.display import Display
from fedcomp_simulations.engines import INPROCESS
from fedcomp_simulations.report import write_report
from fedcomp_simulations.report.figures import save_plot
from fedcomp_simulations.results import Results
from fedcomp_simulations.saving import naming, save
from fedcomp_simulations.store import RunStore
from fedcomp_simulations.study import Study
from fedcomp_simulations.sweep import check_study, plan_study, results_of, run_plan, versions
from fedcomp_simulations.tables import monitor_table, table
from fedcomp_simulations.workers import default_workers

MAX_WARNINGS = 10
NARROW = 110


def run(
    study: Study,
    workers: int | None,
    *,
    monitor: bool = False,
    folder: Path | None = None,
    fresh: bool = False,
    engine: str = INPROCESS,
) -> Results:
    """Run a study, and show its progress and warnings on stderr.

    Args:
        folder: holds the finished runs, which are not made again unless `fresh`; None: nothing is kept.
    """
    check_study(study)
    store = None if folder is None else RunStore(folder, engine, versions(), fresh=fresh)
    plan = plan_study(study, store, monitor=monitor)
    if plan.found and store is not None:
        _note(f"{len(plan.found)} of {len(plan.jobs)} runs are in {store.folder} already; --fresh makes them again")
    failures: dict[str, None] = {}
    with Display([plan.jobs[place] for place in plan.missing], Console(stderr=True)) as display:
        runs = run_plan(
            plan, workers=workers or default_workers(), on_progress=display, store=store,
            on_failure=lambda reason: failures.update({reason: None}), engine=engine,
        )  # fmt: skip
    warn([*failures, *dict.fromkeys(warning for each in runs for warning in each.warnings)])
    return results_of(study, runs, engine)


def write(results: Results, folder: Path, json_file: Path | None, console: Console) -> None:
    """Save first, then show: neither a full disk nor a closed pipe may lose a run that took minutes."""
    texts = {folder / "results.json": json.dumps(results.to_json()) + "\n"}
    if json_file is not None:
        texts[json_file] = json.dumps(results.to_json(seconds=True), indent=1) + "\n"
    failed = [failure for path, text in texts.items() if (failure := save(text, path))]
    made = {} if failed else _illustrate(results, folder, failed)
    for _, part in results.by_task():
        console.print(table(part, narrow=console.width < NARROW))
        if any(each.stats for each in part.runs):
            console.print(monitor_table(part))
    for what, path in made.items():
        console.print(f"{what}: {path}", highlight=False, markup=False, soft_wrap=True)
    if failed:
        raise OSError("; ".join(failed))


def _illustrate(results: Results, folder: Path, failed: list[str]) -> dict[str, Path]:
    """Write what shows the results that are in the folder; what is wrong with a file goes into the list."""
    made = {"results": folder / "results.json"}
    for what, make in {"plot": _save_plot, "report": _save_report}.items():
        try:
            made = {what: make(results, folder)} | made
        except (OSError, FedcompError) as error:  # the other may still be written
            failed.append(str(error))
    return made


def _save_plot(results: Results, folder: Path) -> Path:
    path = folder / "accuracy.png"
    with naming(path):
        save_plot(results, path)
    return path


def _save_report(results: Results, folder: Path) -> Path:
    del results  # it reads them from the folder
    return write_report(folder)


def warn(warnings: list[str]) -> None:
    """Show the first of the warnings, a line each."""
    for warning in warnings[:MAX_WARNINGS]:
        _note(f"warning: {' '.join(warning.split())}")
    if len(warnings) > MAX_WARNINGS:
        _note(f"and {len(warnings) - MAX_WARNINGS} more warnings")


def _note(text: str) -> None:
    print(f"fedcomp: {text}", file=sys.stderr)
