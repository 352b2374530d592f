"""The results of an experiment: the object, its JSON form, and what they say against the uncompressed run."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from rich.markup import escape
from rich.table import Table

from fedcomp.monitor import TensorStats
from fedcomp_simulations.experiment import Experiment, Method


@dataclass(frozen=True)
class RunResult:
    """One method with one seed."""

    method: Method
    seed: int
    rounds: int
    accuracy_curve: tuple[tuple[int, int, float], ...]  # round, payload bytes uploaded so far, accuracy
    payload_bytes_up: int
    payload_bytes_down: int
    uploads: int
    failures: int
    seconds: float
    warnings: tuple[str, ...] = ()
    stats: tuple[TensorStats, ...] = ()  # of every tensor and upload, if the run was monitored
    messages: int = 0  # train messages to clients
    last: int = Experiment.last  # evaluations behind the final accuracy

    @property
    def accuracy_final(self) -> float:
        """Mean of the last evaluations, as many as `last` says."""
        return fmean(accuracy for _, _, accuracy in self.accuracy_curve[-self.last :])

    @property
    def payload_per_upload(self) -> float:
        """Mean payload of an upload in bytes; 0 when nothing was uploaded."""
        return self.payload_bytes_up / self.uploads if self.uploads else 0.0

    @property
    def payload_per_download(self) -> float:
        """Mean payload of a train message to a client in bytes; 0 when none was sent."""
        return self.payload_bytes_down / self.messages if self.messages else 0.0


@dataclass(frozen=True)
class Results:
    """All runs of an experiment, method by method and seed by seed."""

    experiment: str
    parameters: int
    clients: int
    clients_per_round: int
    runs: tuple[RunResult, ...]

    def by_method(self) -> dict[Method, list[RunResult]]:
        """Group the runs by method, in the order they were listed."""
        groups: dict[Method, list[RunResult]] = {}
        for run in self.runs:
            groups.setdefault(run.method, []).append(run)
        return groups

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`; the keys are a contract with whoever reads the file."""
        return {
            "experiment": self.experiment,
            "parameters": self.parameters,
            "clients": self.clients,
            "clients_per_round": self.clients_per_round,
            "runs": [_run_to_json(run) for run in self.runs],
        }


@dataclass(frozen=True)
class Summary:
    """One method over all seeds, against the uncompressed runs of the same seeds."""

    method: Method
    accuracy: float
    accuracy_spread: float | None  # standard deviation over seeds; None with one seed
    points: tuple[float, ...]  # accuracy minus that of the uncompressed twin, by seed; empty without twin
    payload_per_upload: float
    payload_per_download: float
    payload_bytes_up: float  # mean over seeds
    ratio: float | None  # uncompressed payload over this one; None when nothing was uploaded
    failures: int


def summarize(results: Results) -> list[Summary]:
    """Compare the methods of an experiment, in the order they were listed."""
    groups = results.by_method()
    twins = {run.seed: run for method, runs in groups.items() if method.uncompressed for run in runs}
    reference = _mean_payload(twins.values()) or 4.0 * results.parameters
    return [_summary(method, runs, twins, reference) for method, runs in groups.items()]


def table(results: Results, *, narrow: bool = False, front: Collection[Method] = ()) -> Table:
    """Lay the comparison out for a terminal; a narrow one does without the columns that method names stand for.

    With a front its methods get a mark, and names are taken to say codec and feedback.
    """
    summaries = summarize(results)
    columns = {
        "method": [escape(summary.method.name) for summary in summaries],
        "codec": [escape(summary.method.codec) for summary in summaries],
        "feedback": [summary.method.feedback for summary in summaries],
        "accuracy %": [_accuracy(summary) for summary in summaries],
        "points vs float32": [_points(summary) for summary in summaries],
        "B per upload": [f"{summary.payload_per_upload:,.0f}" for summary in summaries],
        "B per download": [f"{summary.payload_per_download:,.0f}" for summary in summaries],
        "uploaded": [format_bytes(summary.payload_bytes_up) for summary in summaries],
        "ratio": [_ratio(summary.ratio) for summary in summaries],
        "failed": [f"{summary.failures:,}" for summary in summaries],
    }
    if front:
        columns["front"] = ["*" if summary.method in front else "" for summary in summaries]
    if narrow or front:
        del columns["codec"], columns["feedback"]
    if narrow:
        del columns["B per download"]
    if not any(summary.failures for summary in summaries):
        del columns["failed"]
    measured = any(summary.method.uncompressed and summary.payload_per_upload for summary in summaries)
    if not measured:
        columns = {"ratio*" if heading == "ratio" else heading: cells for heading, cells in columns.items()}
    caption = _caption(min(results.runs[0].last, results.runs[0].rounds), measured)
    if front:
        caption += "\nfront: nothing else is as accurate for fewer bytes per upload; downloads are not counted"
    sheet = Table(title=_title(results), caption=caption, title_justify="left", caption_justify="left")
    for heading in columns:
        text = heading in ("method", "codec", "feedback")
        sheet.add_column(heading, justify="left" if text else "right", overflow="fold")
    for row in zip(*columns.values(), strict=True):
        sheet.add_row(*row)
    return sheet


def format_bytes(count: float) -> str:
    """Write a number of bytes with a decimal unit, as data plans are billed."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            break
        count /= 1000
    return f"{count:,.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"


def _summary(method: Method, runs: list[RunResult], twins: dict[int, RunResult], reference: float) -> Summary:
    finals = [run.accuracy_final for run in runs]
    payload = _mean_payload(runs)
    return Summary(
        method=method,
        accuracy=fmean(finals),
        accuracy_spread=stdev(finals) if len(finals) > 1 else None,
        points=tuple(100 * (run.accuracy_final - twins[run.seed].accuracy_final) for run in runs if run.seed in twins),
        payload_per_upload=payload,
        payload_per_download=fmean(run.payload_per_download for run in runs),
        payload_bytes_up=fmean(run.payload_bytes_up for run in runs),
        ratio=reference / payload if payload else None,
        failures=sum(run.failures for run in runs),
    )


def _mean_payload(runs: Iterable[RunResult]) -> float:
    runs = list(runs)
    uploads = sum(run.uploads for run in runs)
    return sum(run.payload_bytes_up for run in runs) / uploads if uploads else 0.0


def _accuracy(summary: Summary) -> str:
    spread = "" if summary.accuracy_spread is None else f" ± {100 * summary.accuracy_spread:.1f}"
    return f"{100 * summary.accuracy:.1f}{spread}"


def _points(summary: Summary) -> str:
    points = summary.points
    if summary.method.uncompressed or not points:
        return "-"
    mean, low, high = (f"{round(value, 1) + 0.0:+.1f}" for value in (fmean(points), min(points), max(points)))
    return mean if len(points) == 1 else f"{mean} ({low}, {high})"  # the + 0.0 turns -0.0 into 0.0


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.3g}x" if ratio < 100 else f"{ratio:,.0f}x"


def monitor_table(results: Results) -> Table:
    """What compression did to each tensor: means over uploads and seeds, in the first and last third of the rounds."""
    sheet = Table(title="quantization error by tensor", title_justify="left", caption_justify="left")
    sheet.caption = "means over uploads, first third of the rounds and last third; NMSE against the true update"
    for heading in ("method", "tensor"):
        sheet.add_column(heading, overflow="fold")
    for heading in ("rms", "kurtosis", "error norm", "NMSE", "cosine"):
        sheet.add_column(heading, justify="right")
    for method, runs in results.by_method().items():
        stats = [entry for run in runs for entry in run.stats]
        for tensor in dict.fromkeys(entry.tensor for entry in stats):
            early, late = _thirds([entry for entry in stats if entry.tensor == tensor], runs[0].rounds)
            cells = (
                f"{_mean(early, key):.3g} / {_mean(late, key):.3g}"
                for key in ("rms", "kurtosis", "error_norm", "nmse", "cosine")
            )
            sheet.add_row(escape(method.name), escape(tensor), *cells)
    return sheet


def _thirds(stats: list[TensorStats], rounds: int) -> tuple[list[TensorStats], list[TensorStats]]:
    third = max(1, rounds // 3)
    return [s for s in stats if s.round <= third], [s for s in stats if s.round > rounds - third]


def _mean(stats: list[TensorStats], key: str) -> float:
    return fmean(getattr(entry, key) for entry in stats) if stats else float("nan")


def _title(results: Results) -> str:
    seeds = len({run.seed for run in results.runs})
    return (
        f"{escape(results.experiment)}: {results.parameters:,} parameters, {results.clients_per_round} of "
        f"{results.clients} clients a round, {results.runs[0].rounds} rounds, {seeds} seed{'s' * (seeds > 1)}"
    )


def _caption(last: int, measured: bool) -> str:
    evaluations = f"mean of the last {last} evaluations" if last > 1 else "the last evaluation"
    text = (
        f"accuracy: {evaluations}, ± standard deviation over seeds\n"
        "points: mean (lowest, highest) over seeds; uploaded: mean over seeds"
    )
    return text if measured else f"{text}\n* against 4 bytes per parameter, as no float32 run was made"


def _run_to_json(run: RunResult) -> dict[str, Any]:
    return {
        "name": run.method.name,
        "codec": run.method.codec,
        "feedback": run.method.feedback,
        "seed": run.seed,
        "rounds": run.rounds,
        "accuracy_final": run.accuracy_final,
        "accuracy_curve": [list(point) for point in run.accuracy_curve],
        "payload_bytes_up": run.payload_bytes_up,
        "payload_bytes_down": run.payload_bytes_down,
        "payload_per_upload": run.payload_per_upload,
        "seconds": run.seconds,
    }
