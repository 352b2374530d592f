"""The figures of a report, and the picture that `fedcomp simulate` leaves beside its results."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedcomp_clients.files import replacing
from fedcomp_simulations.report import drawing
from fedcomp_simulations.report.drawing import Style
from fedcomp_simulations.report.targets import Target
from fedcomp_simulations.report.timing import OWN, Timed
from fedcomp_simulations.report.views import Floats, MethodView, TaskView, view_task
from fedcomp_simulations.report.words import delay, link_name, named_links, percent, rate
from fedcomp_simulations.results import Results
from fedcomp_simulations.summary import format_bytes

MOST_POINTS = 200
"""Points of a curve that are drawn: more cannot be seen."""

MANY_TASKS = 6
"""Tasks of a grid up to which each has all figures."""

LOWER = 12.0
"""Points below the lowest final accuracy at which an axis begins, or more if methods differ by more."""

NEGLIGIBLE = 1e-9
"""What is below is rounding, such as the error of an upload that is float32."""

PNG_MODE = 0o644


@dataclass(frozen=True)
class Picture:
    """A figure that is drawn.

    Attributes:
        name: of its file, without ending.
        title, caption, alt: for the page; the last is for those who do not see it.
    """

    name: str
    title: str
    caption: str
    alt: str
    svg: bytes
    png: bytes


def draw_task(view: TaskView, target: Target, *, short: bool = False) -> list[Picture]:
    """Draw the figures of a task; with short only the two that decide. None if nothing was uploaded."""
    if not any(each.uploads for each in view.methods):
        return []
    with _quietly():
        pictures = [_front(view, target), _payload(view, target)]
        if short:
            return pictures
        pictures += [*_wire(view, target), *_links(view, target), _rounds(view, target)]
        pictures += _history(view, "nmse", "Quantization error", _NMSE_CAPTION, "error of an upload (NMSE)")
        pictures += _history(view, "residual", "Residuals", _RESIDUAL_CAPTION, "length, in updates")
        return pictures


def draw_overview(views: Sequence[TaskView], slug: str) -> Picture:
    """Draw the final accuracy of every method in every task of a grid."""
    with _quietly():
        return _overview(views, slug)


def save_plot(results: Results, path: Path) -> None:
    """Write a PNG: accuracy against uploaded bytes, or final accuracies by task where there are several.

    Raises FedcompError for results that cannot be drawn, OSError if the file cannot be written.
    """
    views = [view_task(results.experiment, "task", task, part) for task, part in results.by_task()]
    with _quietly():
        picture = _payload(views[0], None) if len(views) == 1 else _overview(views, "task")
    with replacing(path, PNG_MODE) as file:
        file.write(picture.png)


_NMSE_CAPTION = (
    "How much of an update is lost in one upload: 0 is nothing, 1 is as if nothing had been sent. Unbiased "
    "codecs may be above 1, as their errors cancel out over clients."
)
_RESIDUAL_CAPTION = (
    "What clients hold back to send later, in lengths of an update. A line that keeps rising is a warning."
)


@contextmanager
def _quietly() -> Iterator[None]:
    """Our settings, and no complaints about letters that a font lacks."""
    with matplotlib.rc_context(drawing.RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from", category=UserWarning)
        yield


def _finish(figure: Figure, name: str, title: str, caption: str, alt: str) -> Picture:
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # it is settled, and takes long
    return Picture(name, title, caption, alt, drawing.as_svg(figure, name), drawing.as_png(figure, name))


def _lowest(views: Sequence[MethodView]) -> float:
    """Where an axis of percents begins: somewhat below the final accuracies, which is where methods differ."""
    finals = [100 * view.summary.accuracy for view in views]
    low = min(finals) - max(0.6 * (max(finals) - min(finals)), LOWER)
    return max(0.0, 5.0 * math.floor(low / 5))


def _accuracy_axis(axes: Axes, views: Sequence[MethodView], target: Target | None) -> None:
    low = _lowest(views)
    high = max(100 * float(view.mean.max()) for view in views)
    axes.set_ylim(low, max(high + 0.1 * (high - low), low + 1))
    axes.set_ylabel("test accuracy, %")
    if target is not None:
        axes.axhline(100 * target.accuracy, color="#bb2222", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1.5)


def _curves(
    view: TaskView,
    target: Target | None,
    x_of: Callable[[MethodView], Floats | None],
    finish: Callable[[Axes], None],
    *,
    above_zero: bool = True,
) -> tuple[Figure, list[MethodView]] | None:
    """Accuracy of each method against what x_of gives; None if it gives nothing."""
    shown = [each for each in view.methods if each.uploads and x_of(each) is not None]
    if not shown:
        return None
    chosen = drawing.styles(view)
    figure, axes = drawing.new_axes()
    ends, begins = [], []
    for each in sorted(shown, key=lambda each: chosen[each.number].strong):
        x = x_of(each)
        assert x is not None
        index = _thinned((x > 0) | (not above_zero))
        style = chosen[each.number]
        if index.size == 0:
            continue
        _line(axes, x[index], 100 * each.accuracy[:, index], style)
        ends.append((float(x[index][-1]), 100 * float(each.mean[index][-1]), str(each.number), style))
        begins.append(float(x[index][np.argmax(100 * each.mean[index] >= _lowest(shown))]))
    if above_zero and begins:
        axes.set_xlim(min(begins) / 1.6, 1.6 * max(end[0] for end in ends))
    _accuracy_axis(axes, shown, target)
    finish(axes)
    drawing.add_legend(figure, view, {each.number: chosen[each.number] for each in shown})
    drawing.label_ends(figure, axes, ends)
    return figure, shown


def _thinned(visible: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Where to draw, MOST_POINTS places at most, the last one among them."""
    index = np.flatnonzero(visible)
    if index.size <= MOST_POINTS:
        return index
    return index[np.linspace(0, index.size - 1, MOST_POINTS).round().astype(np.int64)]


def _line(axes: Axes, x: Floats, accuracy: Floats, style: Style) -> None:
    """The mean over seeds, and the range of those that matter as a shade."""
    if style.strong and len(accuracy) > 1:
        low, high = accuracy.min(axis=0), accuracy.max(axis=0)
        axes.fill_between(x, low, high, color=style.colour, alpha=0.1, linewidth=0, zorder=1.8)
    width, order = (1.6, 3.0) if style.strong else (0.8, 2.0)
    mean = accuracy.mean(axis=0)
    axes.plot(x, mean, color=style.colour, linestyle=style.dash, linewidth=width, zorder=order)
    axes.plot(
        x[-1:], mean[-1:], style.marker, color=style.colour, markersize=3.5 if style.strong else 2.5, zorder=order
    )


def _alt(what: str, shown: Sequence[MethodView]) -> str:
    best = sorted(shown, key=lambda each: -each.summary.accuracy)[:5]
    ends = ", ".join(f"{each.name} {percent(each.summary.accuracy)}" for each in best)
    return f"{what}. The table below has the figures; the most accurate in the end: {ends}."


def _payload(view: TaskView, target: Target | None) -> Picture:
    made = _curves(view, target, lambda each: each.payload, _finish_bytes("uploaded by all clients together, payload"))
    figure, shown = made or (drawing.new_axes()[0], [])  # a picture even if nothing was uploaded
    caption = "Bytes of the uploads that arrived, all clients and rounds together. Further left is cheaper." + _note(
        view
    )
    return _finish(
        figure,
        f"{view.slug}-payload",
        "Accuracy against uploaded bytes",
        caption,
        _alt("Line chart: test accuracy against uploaded payload bytes, logarithmic", shown),
    )


def _finish_bytes(label: str) -> Callable[[Axes], None]:
    def finish(axes: Axes) -> None:
        drawing.byte_axis(axes)
        axes.set_xlabel(f"{label} (log)")

    return finish


def _note(view: TaskView) -> str:
    """What lines mean."""
    seeds = " Lines are means over seeds, shades their range." if len(view.seeds) > 1 else ""
    target = " The dashed red line is the target."
    grey = " Grey: methods that another one beats; their numbers are in the key."
    return seeds + target + (grey if len(view.methods) > drawing.ALL_STRONG else "")


def _wire(view: TaskView, target: Target) -> Iterator[Picture]:
    up = _curves(view, target, lambda each: each.wire_up, _finish_bytes("sent on all uplinks"))
    if up is not None:
        yield _finish(
            up[0],
            f"{view.slug}-wire-up",
            "Accuracy against bytes on the uplinks",
            "Uploads as the network carries them, with Flower's requests and transport.",
            _alt("Line chart: test accuracy against bytes on all uplinks, transport included, logarithmic", up[1]),
        )
    both = _curves(view, target, lambda each: each.wire, _finish_bytes("sent on all links, up and down"))
    if both is not None:
        yield _finish(
            both[0],
            f"{view.slug}-wire",
            "Accuracy against all bytes on the links",
            "Uploads and downloads with transport: what a data plan is billed for. Compressing uploads alone "
            "leaves the downloads as they are.",
            _alt("Line chart: test accuracy against bytes on all links both ways, logarithmic", both[1]),
        )


def _links(view: TaskView, target: Target) -> Iterator[Picture]:
    for link in named_links(view):
        made = _curves(view, target, _seconds_on(link), _finish_time(link_name(link)))
        if made is not None:
            yield _finish(
                made[0],
                f"{view.slug}-time-{link.name}",
                f"Accuracy against time on {link_name(link)}",
                time_caption(link),
                _alt(f"Line chart: test accuracy against time on {link_name(link)}, logarithmic", made[1]),
            )


def time_caption(timed: Timed) -> str:
    """What counts in a figure over time."""
    if timed.name != OWN:
        (link,) = timed.links
        clients = "as every client has" if timed.own else "if every client had"
        return (
            f"Transmission alone, {clients} {rate(link.up_bps)} up, {rate(link.down_bps)} down and "
            f"{delay(link.rtt_s)} a round trip. Training takes its time besides."
        )
    assert timed.fleet is not None
    named = [f"{100 * share:.3g} % of the clients on {link_name(link)}" for link, share in timed.fleet.mix]
    where = ", ".join(named) if len(named) > 1 else "".join(f"All clients on {link_name(link)}" for link in timed.links)
    parts = [where or "Bytes take no time, as no link is set", f"{timed.fleet.compute_s:g} s of training a round"]
    if timed.fleet.stragglers:
        parts.append(f"{timed.fleet.slowdown:g} times as long for {100 * timed.fleet.stragglers:.3g} % of the clients")
    if timed.fleet.deadline_s < math.inf:
        parts.append(f"a round ends after {timed.fleet.deadline_s:g} s, and lasts as long if a reply is missing")
    return f"{'; '.join(parts)}."


def _seconds_on(link: Timed) -> Callable[[MethodView], Floats | None]:
    return lambda each: each.seconds.get(link.name)


def _finish_time(name: str) -> Callable[[Axes], None]:
    def finish(axes: Axes) -> None:
        drawing.time_axis(axes)
        axes.set_xlabel(f"time on {name} (log)")

    return finish


def _rounds(view: TaskView, target: Target) -> Picture:
    def finish(axes: Axes) -> None:
        axes.set_xlabel("round")

    made = _curves(view, target, lambda each: each.rounds.astype(np.float64), finish, above_zero=False)
    assert made is not None  # somebody uploaded
    return _finish(
        made[0],
        f"{view.slug}-rounds",
        "Accuracy against rounds",
        "What compression costs in learning, whatever the bytes.",
        _alt("Line chart: test accuracy against rounds", made[1]),
    )


def _front(view: TaskView, target: Target) -> Picture:
    """Final accuracy against bytes per upload; methods that no other beats are connected."""
    chosen = drawing.styles(view)
    figure, axes = drawing.new_axes()
    shown = [each for each in view.methods if each.uploads]
    size = {each.number: each.summary.payload_per_upload for each in shown}
    final = {each.number: 100 * each.summary.accuracy for each in shown}
    front = [each.number for each in view.front]
    axes.plot(
        [size[n] for n in front],
        [final[n] for n in front],
        color="#bdbdbd",
        linewidth=3,
        solid_capstyle="round",
        zorder=1.6,
    )
    for each in shown:
        style, ends = chosen[each.number], [100 * run.accuracy_final for run in each.runs]
        n = each.number
        axes.plot([size[n]] * 2, [min(ends), max(ends)], color=style.colour, linewidth=1.1, zorder=2.5)
        face = style.colour if n in front else "white"
        axes.plot(size[n], final[n], style.marker, color=style.colour, markerfacecolor=face, markersize=5.5, zorder=3)
    every = [100 * run.accuracy_final for each in shown for run in each.runs]
    low, high = min(every), max(every)
    axes.set_ylim(max(0.0, low - 0.08 * (high - low) - 1), min(101.0, high + 0.08 * (high - low) + 1))
    axes.set_ylabel("final test accuracy, %")
    axes.axhline(100 * target.accuracy, color="#bb2222", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1.5)
    axes.set_xlim(min(size.values()) / 1.6, max(size.values()) * 2)
    drawing.byte_axis(axes)
    axes.set_xlabel("bytes per upload, payload (log)")
    drawing.add_legend(figure, view, {each.number: chosen[each.number] for each in shown})
    drawing.label_ends(figure, axes, [(size[n], final[n], str(n), chosen[n]) for n in size])
    names = "; ".join(
        f"{each.name} {percent(each.summary.accuracy)} at {format_bytes(size[each.number])}" for each in view.front
    )
    caption = (
        "Filled and connected: methods that no other beats in accuracy for about as few bytes. Upper left is best. "
        "The dashed red line is the target."
    )
    if len(view.seeds) > 1:
        caption += " Bars: lowest and highest seed."
    return _finish(
        figure,
        f"{view.slug}-front",
        "Which method for how many bytes",
        caption,
        f"Scatter chart: final accuracy against bytes per upload, logarithmic. On the Pareto front: {names}.",
    )


def _history(view: TaskView, key: str, title: str, caption: str, label: str) -> Iterator[Picture]:
    """A quantity of each round, of the methods that have it."""
    chosen = drawing.styles(view)
    known: dict[int, Floats] = {}
    for each in view.methods:
        values = getattr(each, key)
        if values is not None and (values > NEGLIGIBLE).any():
            known[each.number] = values
    if not known:
        return
    figure, axes = drawing.new_axes()
    ends = []
    for number, values in sorted(known.items(), key=lambda entry: chosen[entry[0]].strong):
        index = _thinned(values > NEGLIGIBLE)  # which NaN is not
        style = chosen[number]
        width = 1.4 if style.strong else 0.8
        axes.plot(index + 1, values[index], color=style.colour, linestyle=style.dash, linewidth=width)
        ends.append((float(index[-1] + 1), float(values[index[-1]]), str(number), style))
    drawing.log_values(axes)
    axes.set_xlabel("round")
    axes.set_ylabel(f"{label} (log)")
    drawing.add_legend(figure, view, {number: style for number, style in chosen.items() if number in known})
    drawing.label_ends(figure, axes, ends)
    last = ", ".join(f"{each.name} {getattr(each, key)[-1]:.2g}" for each in view.methods if each.number in known)
    yield _finish(figure, f"{view.slug}-{key}", title, caption, f"Line chart: {title.lower()} by round. Last: {last}.")


def _overview(views: Sequence[TaskView], slug: str) -> Picture:
    """A row of dots for each task, a colour for each method."""
    run = [view for view in views if view.methods]
    names = list(dict.fromkeys(each.name for view in run for each in view.methods))
    longest = max(run, key=lambda view: len(view.methods))
    chosen = drawing.styles(longest)
    by_name = {each.name: chosen[each.number] for each in longest.methods}
    figure, axes = drawing.new_axes(1.0 + 0.3 * len(run))
    for place, view in enumerate(run):
        for each in view.methods:
            style = by_name.get(each.name, Style(drawing.FAINT, "-", "o", False))
            order = 3 if style.strong else 2
            axes.plot(
                100 * each.summary.accuracy,
                place,
                style.marker,
                color=style.colour,
                markersize=5.5,
                alpha=0.85,
                zorder=order,
            )
    axes.set_yticks(range(len(run)), [drawing.elided(view.task.name or view.title, 30) for view in run])
    axes.set_ylim(len(run) - 0.5, -0.5)
    axes.set_xlabel("final test accuracy, %")
    drawing.add_legend(figure, longest, chosen, dots=True)
    return _finish(
        figure,
        f"{slug}-overview",
        "Final accuracy over the grid",
        "A dot for each method, mean over seeds.",
        f"Dot chart: final accuracy of {len(names)} methods in {len(run)} tasks; the table beside it has the figures.",
    )
