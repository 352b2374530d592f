"""Accuracy against uploaded bytes, as a picture. Only this file imports matplotlib."""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from fedcomp_simulations.results import Results, RunResult
from fedcomp_simulations.summary import format_bytes

# After Okabe and Ito, told apart by colour-blind readers too; darker where names would be faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#8E4585", "#B07500", "#3D93C6")
GREY = "#444444"  # the uncompressed twin
TAIL = 10  # points of a curve that its name must not cover
LINE_HEIGHT = 15  # pixels kept between two labels at 100 dpi


def save_plot(results: Results, path: Path) -> None:
    """Write a PNG with the mean over seeds of every method as a line and their range as a shade."""
    with matplotlib.rc_context({"text.parse_math": False}):  # a dollar in a name is a dollar
        _save(results, path)


def _save(results: Results, path: Path) -> None:
    figure = Figure(figsize=(9, 5.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = iter(COLOURS * (1 + len(results.runs)))
    ends: list[tuple[float, float, str, str]] = []
    for method, runs in results.by_method().items():
        colour = GREY if method.uncompressed else next(colours)
        end = _draw(axes, runs, colour)
        if end is not None:
            ends.append((*end, method.name, colour))
    _style(axes, results)
    _label(figure, axes, ends)
    figure.savefig(path, dpi=160, format="png")


def _draw(axes: Axes, runs: list[RunResult], colour: str) -> tuple[float, float] | None:
    """Draw one method and return the place of its name, at the end of its line; none if it never uploaded."""
    curves: NDArray[np.float64] = np.array([run.accuracy_curve for run in runs], dtype=np.float64)
    sent = curves[:, :, 1].mean(axis=0)  # (rounds,)
    accuracy = 100 * curves[:, :, 2]  # (seeds, rounds)
    visible = sent > 0  # the axis is logarithmic
    if not visible.any():
        return None
    sent, accuracy = sent[visible], accuracy[:, visible]
    mean = accuracy.mean(axis=0)
    axes.fill_between(sent, accuracy.min(axis=0), accuracy.max(axis=0), color=colour, alpha=0.12, linewidth=0)
    axes.plot(sent, mean, color=colour, linewidth=1.8)
    axes.plot(sent[-1:], mean[-1:], "o", color=colour, markersize=5)
    return float(sent[-1]), float(mean[-TAIL:].max())


def _style(axes: Axes, results: Results) -> None:
    seeds = len({run.seed for run in results.runs})
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(10))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("uploaded by all clients together (payload, logarithmic)")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(
        f"{results.experiment}: accuracy against uploaded bytes, {results.runs[0].rounds} rounds, "
        f"{'mean and range of ' if seeds > 1 else ''}{seeds} seed{'s' * (seeds > 1)}",
        loc="left",
        fontsize=11,
    )
    axes.grid(which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.04)


def _label(figure: Figure, axes: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Write each name at the end of its line, moved apart where two would overlap."""
    figure.draw_without_rendering()  # settles the layout, on which positions in pixels depend
    taken: list[tuple[float, float, float]] = []  # left, right, height of the labels so far, in pixels
    for x, y, name, colour in sorted(ends, key=lambda end: -end[1]):
        right, level = axes.transData.transform((x, y))
        left, height = right - 7.0 * len(name), level + 12
        while any(left < end and right > start and abs(height - h) < LINE_HEIGHT for start, end, h in taken):
            height += 1
        taken.append((left, right, height))
        axes.annotate(
            name,
            (x, y),
            xytext=(4, (height - level) * 72 / figure.dpi),
            textcoords="offset points",
            ha="right",
            va="center",
            color=colour,
            fontweight="bold",
            fontsize=9.5,
            path_effects=[withStroke(linewidth=3, foreground="white")],
            annotation_clip=False,
        )
