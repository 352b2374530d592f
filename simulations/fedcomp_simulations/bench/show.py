"""The bench's rows as a table for the terminal and as a rate-distortion plot."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.markup import escape
from rich.table import Table

from fedcomp_simulations.bench.measure import Row

if TYPE_CHECKING:
    from fedcomp_simulations.bench.server import ServerRow
    from fedcomp_simulations.bench.wire import WireRow

BIASED, UNBIASED, PEER = "#0072B2", "#D55E00", "#777777"
LEAST_RATE = 0.003


def table(rows: list[Row]) -> Table:
    """One line a codec; speeds as MB/s of float32 and, in brackets, as a share of memcpy in the same run."""
    first = rows[0]
    sheet = Table(
        title=f"{first.input}: {first.n:,} values, memcpy {first.memcpy_mb_s:,.0f} MB/s",
        caption="bits: 8 len(frame) / values; scaled: after the best single scale. "
        "Never compare NMSE between biased and unbiased codecs.",
        title_justify="left",
        caption_justify="left",
    )
    sheet.add_column("codec", overflow="fold")
    for heading in ("bits", "NMSE", "scaled", "encode MB/s", "decode MB/s"):
        sheet.add_column(heading, justify="right", no_wrap=True)
    sheet.add_column("bias")
    for row in rows:
        sheet.add_row(
            escape(row.codec),
            f"{row.bits_per_parameter:.3f}",
            f"{row.nmse:.4g}",
            f"{row.nmse_scaled:.4g}",
            _speed(row.encode_mb_s, row.memcpy_mb_s),
            _speed(row.decode_mb_s, row.memcpy_mb_s),
            {True: "unbiased", False: "biased", None: "peer"}[row.unbiased],
        )
    return sheet


def server_table(rows: "list[ServerRow]") -> Table:
    """One line a codec: time from frames to the mean, and Flower's for uncompressed models in the same run."""
    first = rows[0]
    sheet = Table(
        title=f"server: {first.clients:,} replies of {first.parameters:,} parameters, on {first.device}",
        caption="ms per reply; speed: Flower's time for uncompressed models over ours; peak: besides frames and base.",
        title_justify="left",
        caption_justify="left",
    )
    sheet.add_column("codec", overflow="fold")
    for heading in ("ms", "Flower ms", "speed", "peak MB"):
        sheet.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        sheet.add_row(
            escape(row.codec),
            f"{row.ms_per_reply:.3f}",
            f"{row.flower_ms_per_reply:.3f}",
            f"{row.speedup_vs_flower:.2f}",
            f"{row.peak_bytes / 1e6:.1f}",
        )
    return sheet


def wire_table(rows: "list[WireRow]") -> Table:
    """One line a setting: requests of a round by kind, and what the client's uplink carried."""
    start = max(row.start_bytes_up for row in rows)
    down, idle = max(row.start_bytes_down for row in rows), max(row.idle_bytes_up for row in rows)
    sheet = Table(
        title="wire: one round of one client, training and evaluation, 60 tensors 32 x 32 and a scalar",
        caption="Bytes in the sockets with HTTP headers; beyond: what is not payload. Requests: for a message / for "
        f"an object down / to confirm / to announce a reply / for an object up. Apart: the first message of a run, "
        f"{start:,} B up and {down:,} B down; asking in vain, {idle:,} B up every 3 s.",
        title_justify="left",
        caption_justify="left",
    )
    sheet.add_column("setting", overflow="fold")
    for heading in ("messages", "requests", "bytes up", "payload", "beyond", "bytes down"):
        sheet.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        kinds = ("pull-messages", "pull-object", "confirm-message-received", "push-messages", "push-object")
        others = sum(count for name, count in row.requests.items() if name not in kinds)
        counts = [row.requests.get(name, 0) for name in kinds] + ([others] if others else [])
        sheet.add_row(
            escape(row.method),
            f"{row.messages}",
            " / ".join(map(str, counts)),
            f"{row.bytes_up:,}",
            f"{row.payload_up:,}",
            f"{row.bytes_up_beyond:,}",
            f"{row.bytes_down:,}",
        )
    return sheet


def _speed(speed: float, memcpy: float) -> str:
    return f"{speed:,.0f} ({speed / memcpy:.3f})"


def save_plot(rows: list[Row], path: Path) -> None:
    """Write a PNG with NMSE (after the best scale) against bits, one picture an input, both axes logarithmic."""
    inputs = list(dict.fromkeys(row.input for row in rows))
    figure = Figure(figsize=(11.5, 6.2 * len(inputs)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(len(inputs), squeeze=False)[:, 0], inputs, strict=True):
        _draw(axes, name, [row for row in rows if row.input == name])
    figure.savefig(path, dpi=150, format="png")


def _clusters(rows: list[Row]) -> dict[tuple[float, float], list[int]]:
    """Numbers of the rows by place, those too close to be told apart together."""
    places: dict[tuple[float, float], list[int]] = {}
    for number, row in enumerate(rows, 1):
        here = (row.bits_per_parameter, row.nmse_scaled)
        near = (p for p in places if abs(np.log10(p[0] / here[0])) < 0.07 and abs(np.log10(p[1] / here[1])) < 0.12)
        places.setdefault(next(near, here), []).append(number)
    return places


def _ranges(numbers: list[int]) -> str:
    """Numbers with runs drawn together: 3, 7-9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _draw(axes: Axes, name: str, rows: list[Row]) -> None:
    shown = [row for row in rows if row.bits_per_parameter > LEAST_RATE and row.nmse_scaled > 0]
    rates = np.geomspace(LEAST_RATE, max([row.bits_per_parameter for row in shown], default=8), 200)
    if name == "gauss":
        axes.plot(rates, 2.0 ** (-2 * rates), color="black", linewidth=1, label="Shannon bound, 2^(-2R)")
    elif name == "laplace":
        bound = np.e / np.pi * 2.0 ** (-2 * rates)
        axes.plot(rates[rates > 1], bound[rates > 1], color="black", linewidth=1, label="Shannon lower bound")
    for label, colour, wanted in (("biased", BIASED, False), ("unbiased", UNBIASED, True), ("peers", PEER, None)):
        group = [row for row in shown if row.unbiased is wanted]
        if group:
            x = [row.bits_per_parameter for row in group]
            axes.plot(x, [row.nmse_scaled for row in group], "o", color=colour, markersize=5, label=label)
    shown.sort(key=lambda row: row.bits_per_parameter)
    for place, numbers in _clusters(shown).items():
        axes.annotate(_ranges(numbers), place, xytext=(5, 4), textcoords="offset points", fontsize=8)
    listed = "\n".join(f"{number:>2}  {row.codec[:44]}" for number, row in enumerate(shown, 1))
    axes.text(1.02, 1, listed, transform=axes.transAxes, va="top", fontsize=7.5, family="monospace", parse_math=False)
    axes.set(xscale="log", yscale="log", xlabel="bits per parameter, from the frame's length")
    axes.set_ylabel("NMSE after the best scale")
    axes.set_title(f"{name}, {rows[0].n:,} values", loc="left", fontsize=11)
    axes.grid(which="major", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
