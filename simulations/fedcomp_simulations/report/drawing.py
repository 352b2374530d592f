"""How figures look: sizes, colours, axes, and labels that do not cover each other.

A figure is as wide as a phone, with letters that can be read there; wider screens show it larger.
"""

import hashlib
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from fedcomp_simulations.report.views import TaskView
from fedcomp_simulations.report.words import format_duration
from fedcomp_simulations.summary import format_bytes

# After Okabe and Ito, told apart by colour-blind readers too; darker where names would be faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#8E4585", "#B07500", "#3D93C6")
Dash = Literal["-"] | tuple[float, tuple[float, ...]]

DASHES: tuple[Dash, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
MARKERS = ("o", "s", "^", "D")
INK = "#222222"  # the uncompressed twin
FAINT = "#9a9a9a"  # methods that stand back
FAINT_TEXT = "#666666"
WIDTH = 4.2  # inches, at 100 dots an inch
HEIGHT = 3.3  # inches, without legend
ALL_STRONG = 7  # methods up to which none stands back
LONG_NAME = 26  # letters from which on the legend has one column

RC: dict[Any, Any] = {
    "text.parse_math": False,  # a dollar in a name is a dollar
    "svg.fonttype": "none",
    "font.size": 9,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "legend.fontsize": 8,
    "axes.titlesize": 10,
}
MADE_BY = "fedcomp report"
_DRAWN = re.compile(rb"<path [^>]*>")
_LONG = re.compile(rb"(\.[0-9]{2})[0-9]+")  # hundredths of a point are enough
_NO_XML = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_SECONDS = (1, 10, 60, 600, 3600, 6 * 3600, 86_400, 7 * 86_400, 30 * 86_400, 365 * 86_400)
_TIME_NAMES = ("1 s", "10 s", "1 min", "10 min", "1 h", "6 h", "1 day", "1 week", "30 days", "1 year")


@dataclass(frozen=True)
class Style:
    """How a method is drawn, the same in all figures of a task."""

    colour: str
    dash: Dash
    marker: str
    strong: bool


def styles(view: TaskView) -> dict[int, Style]:
    """A style for each method by number: colours for all of a few; of many, for uncompressed ones and the front."""
    few = len(view.methods) <= ALL_STRONG
    strong = {each.number for each in view.methods if few or each in view.front or not each.compressed}
    found: dict[int, Style] = {}
    used = 0
    for each in view.methods:
        if each.summary.method.uncompressed:
            found[each.number] = Style(INK, "-", "o", True)
        elif each.number in strong:
            turn, place = divmod(used, len(COLOURS))
            turn %= len(DASHES)
            found[each.number] = Style(COLOURS[place], DASHES[turn], MARKERS[turn], True)
            used += 1
        else:
            found[each.number] = Style(FAINT, "-", "o", False)
    return found


def new_axes(height: float = HEIGHT) -> tuple[Figure, Axes]:
    """A figure with one pair of axes."""
    figure = Figure(figsize=(WIDTH, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(which="major", color="#e3e3e3", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#888888")
    axes.tick_params(colors="#444444", labelcolor=INK, length=3)
    return figure, axes


def add_legend(figure: Figure, view: TaskView, chosen: dict[int, Style], *, dots: bool = False) -> None:
    """Name methods below the axes, by lines or dots, and make the figure longer by as much."""
    names = {each.number: each.name for each in view.methods if each.number in chosen}
    columns = 1 if any(len(name) > LONG_NAME for name in names.values()) else 2
    rows = math.ceil(len(names) / columns)
    handles = [
        Line2D(
            [], [], color=style.colour, linestyle="none" if dots else style.dash, linewidth=2 if style.strong else 1,
            marker=style.marker if dots else None, markersize=5.5,
            label=f"{number}  {elided(names[number], 52 if columns == 1 else LONG_NAME)}",
        )
        for number, style in chosen.items()
    ]  # fmt: skip
    figure.set_figheight(figure.get_figheight() + 0.15 * rows + 0.1)
    legend = figure.legend(
        handles=handles, loc="outside lower left", ncols=columns, frameon=False, handlelength=2, columnspacing=1.2,
        handletextpad=0.6, labelspacing=0.3, borderaxespad=0.2, borderpad=0.1,
    )  # fmt: skip
    for text, style in zip(legend.get_texts(), chosen.values(), strict=True):
        text.set_color(INK if style.strong else FAINT_TEXT)


def elided(name: str, length: int) -> str:
    """The name, with its middle left out if it is longer."""
    if len(name) <= length:
        return name
    half = (length - 1) // 2
    return f"{name[: length - 1 - half]}…{name[len(name) - half :]}"


def byte_axis(axes: Axes) -> None:
    """A logarithmic x axis of bytes, once everything is drawn."""
    _log_axis(axes, [10.0**power for power in range(16)], format_bytes)


def time_axis(axes: Axes) -> None:
    """A logarithmic x axis of seconds, once everything is drawn."""
    names = dict(zip(map(float, _SECONDS), _TIME_NAMES, strict=True))
    _log_axis(axes, list(names), lambda value: names.get(value) or format_duration(value))


def log_values(axes: Axes) -> None:
    """A logarithmic y axis of plain numbers, once everything is drawn."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks = [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    if len(ticks) < 3:
        powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
        ticks = [10.0**power * factor for power in powers for factor in (1, 2, 5)]
        ticks = [value for value in ticks if low <= value <= high]
    if len(ticks) < 2:
        ticks = [value for value in MaxNLocator(4).tick_values(low, high) if low <= value <= high]
    axes.yaxis.set_major_locator(FixedLocator(ticks[:: math.ceil(len(ticks) / 7)]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.set_ylim(low, high)


def _log_axis(axes: Axes, decades: Sequence[float], name: Callable[[float], str]) -> None:
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = [value for value in decades if low <= value <= high]
    if len(ticks) < 3:
        fine = sorted(value * factor for value in [decades[0] / 10, *decades] for factor in (1, 2, 5))
        ticks = [value for value in fine if low <= value <= high]
        ticks = [value for value, before in zip(ticks, [0.0, *ticks], strict=False) if value > 1.6 * before]
    ticks = ticks[:: math.ceil(len(ticks) / 6)] if ticks else [math.sqrt(low * high)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: name(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(low, high)


def label_ends(figure: Figure, axes: Axes, ends: Sequence[tuple[float, float, str, Style]]) -> None:
    """Write short labels right of points, moved up and down where two would overlap."""
    figure.draw_without_rendering()  # settles the layout, on which positions in pixels depend
    placed: list[tuple[float, float]] = []  # x and height in pixels
    bottom, top = axes.bbox.y0, axes.bbox.y1
    for x, y, text, style in sorted(ends, key=lambda end: (not end[3].strong, -end[1])):
        at, level = axes.transData.transform((x, y))
        height = _free(level, [h for p, h in placed if abs(p - at) < 16], bottom, top)
        placed.append((at, height))
        axes.annotate(
            text, (x, y), xytext=(6, (height - level) * 72 / figure.dpi), textcoords="offset points", ha="left",
            va="center", fontsize=7.5, color=style.colour if style.strong else FAINT_TEXT,
            fontweight="bold" if style.strong else "normal", annotation_clip=False,
            path_effects=[withStroke(linewidth=2, foreground="white")],
        )  # fmt: skip


def _free(level: float, taken: Sequence[float], bottom: float, top: float, gap: float = 10) -> float:
    """The height nearest to the level that is a gap away from all taken ones, within the axes if it can be."""
    candidates = [level, *(h + sign * gap for h in taken for sign in (-1, 1))]
    free = [c for c in candidates if all(abs(c - h) >= gap - 1e-6 for h in taken)]
    inside = [c for c in free if bottom - gap <= c <= top + gap]
    return min(inside or free, key=lambda c: abs(c - level))


def as_svg(figure: Figure, name: str) -> bytes:
    """The figure as SVG; the same figure gives the same bytes."""
    page = io.BytesIO()
    with matplotlib.rc_context(RC | {"svg.hashsalt": hashlib.sha256(name.encode()).hexdigest()[:8]}):
        figure.savefig(page, format="svg", metadata={"Date": None, "Creator": None})
    return _DRAWN.sub(lambda path: _LONG.sub(rb"\1", path[0]), _NO_XML.sub(b"", page.getvalue()))


def as_png(figure: Figure, name: str) -> bytes:
    """The figure as PNG, for slides; says inside who made it, and its name."""
    page = io.BytesIO()
    with matplotlib.rc_context(RC):
        figure.savefig(page, format="png", dpi=200, metadata={"Software": MADE_BY, "Title": name})
    return page.getvalue()
