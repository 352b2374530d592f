"""Results as tables for a terminal."""

from collections.abc import Collection
from statistics import fmean

from rich.markup import escape
from rich.table import Table

from fedcomp.monitor import TensorStats
from fedcomp_simulations.experiment import Method
from fedcomp_simulations.results import Results
from fedcomp_simulations.summary import Summary, format_bytes, summarize


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
    points = {run.task for run in results.runs}
    where = f" [{points.pop()}]" if len(points) == 1 and points != {""} else ""
    return (
        f"{escape(results.experiment + where)}: {results.parameters:,} parameters, {results.clients_per_round} of "
        f"{results.clients} clients a round, {results.runs[0].rounds} rounds, {seeds} seed{'s' * (seeds > 1)}"
    )


def _caption(last: int, measured: bool) -> str:
    evaluations = f"mean of the last {last} evaluations" if last > 1 else "the last evaluation"
    text = (
        f"accuracy: {evaluations}, ± standard deviation over seeds\n"
        "points: mean (lowest, highest) over seeds; uploaded: mean over seeds"
    )
    return text if measured else f"{text}\n* against 4 bytes per parameter, as no plain float32 run was made"
