"""The tables of a report."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fedcomp_simulations.config import to_config
from fedcomp_simulations.links import Link
from fedcomp_simulations.report.markup import Markup, join, tag
from fedcomp_simulations.report.targets import Target, reached
from fedcomp_simulations.report.timing import OWN, Timed
from fedcomp_simulations.report.views import MethodView, TaskView
from fedcomp_simulations.report.words import (
    delay,
    format_duration,
    format_points,
    link_name,
    named_links,
    percent,
    rate,
)
from fedcomp_simulations.summary import format_bytes

NONE = "–"  # noqa: RUF001
NO_BREAK = "\u2011"  # a hyphen
NOT_REACHED = "not reached"
_JOULES = (("MJ", 1e6), ("kJ", 1e3), ("J", 1.0))


def comparison(view: TaskView) -> Markup:
    """Accuracy and size of every method."""
    full = view.reference is not None and view.reference.uploads
    heads = ["accuracy %", "points against float32", "bytes per upload", "times smaller" + ("" if full else "*")]
    troubled = any(each.summary.failures for each in view.methods)
    if troubled:
        heads.append("nothing usable")
    late = any("late" in each.outcomes() for each in view.methods)
    if late:
        heads.append("of these late")
    rows = []
    for each in view.methods:
        cells = [
            _accuracy(each),
            NONE if each is view.reference else _points(each),
            f"{each.summary.payload_per_upload:,.0f}",
            _ratio(each),
        ]
        if troubled:
            cells.append(f"{each.summary.failures:,}")
        if late:
            cells.append(f"{each.outcomes().get('late', 0):,}")
        rows.append((_name(each), cells, each in view.front))
    last = min(view.results.runs[0].last, view.results.runs[0].rounds)
    caption = (
        f"Accuracy: mean of the last {last} evaluations{_spread_words(view)}. Points: mean (lowest, highest seed). "
        "Marked: no other method is more accurate for about as few bytes."
    )
    if not full:
        why = "no float32 run was made" if view.reference is None else "no float32 upload arrived"
        caption += f" * against 4 bytes per parameter, as {why}."
    return sheet("Accuracy and size", caption, ["method", *heads], rows)


def costs(view: TaskView, target: Target) -> Markup:
    """What it takes every method to reach the target."""
    wired = any(each.wire is not None for each in view.methods)
    heads = ["rounds", "uploaded payload"]
    if wired:
        heads += ["on the uplinks", "on all links"]
    links = named_links(view)
    heads += [f"time on {link_name(link)}".replace("-", NO_BREAK) for link in links]
    rows = []
    for each in view.methods:
        at = reached(each, target) if each.uploads else None
        if at is None:
            cells = [NOT_REACHED, *[NONE] * (len(heads) - 1)]
        else:
            cells = [f"{each.rounds[at]:,}", format_bytes(each.payload[at])]
            if wired:
                cells += [NONE if b is None else format_bytes(b[at]) for b in (each.wire_up, each.wire)]
            cells += [_time(each, at, link) for link in links]
        rows.append((_name(each), cells, each in view.front))
    caption = (
        f"Until the mean over seeds and three evaluations is at {percent(target.accuracy)}. Bytes of all clients "
        "together, mean over seeds."
    )
    return sheet(f"What it takes to reach {target.words}", caption, ["method", *heads], rows)


def times(view: TaskView, target: Target) -> Markup:
    """Time until the target on every link, and energy where a link knows it; nothing if none was recorded."""
    if not view.links:
        return Markup()
    rows = []
    for each in view.methods:
        at = reached(each, target) if each.uploads else None
        cells = [NONE if at is None else _time(each, at, link) for link in view.links]
        rows.append((_name(each), cells, each in view.front))
    heads = ["method", *(link_name(link).replace("-", NO_BREAK) for link in view.links)]
    caption = (
        "As if all clients were on this link: a round lasts until the last byte of its slowest client, whose reply may "
        "be lost or late. Transmission alone: no training, no deadline, no waiting for clients that are absent."
    )
    if view.links[0].name == OWN:
        caption += (
            " But on the experiment's own links, clients have theirs, training takes the time that is set, and the "
            "server waits for missing replies until its deadline."
        )
    elif view.links[0].own:
        caption += f" The experiment's own is {link_name(view.links[0])}."
    return join(sheet(f"Time on each link to reach {target.words}", caption, heads, rows), _energy(view, target))


def _energy(view: TaskView, target: Target) -> Markup:
    """Energy of bytes until the target and to the end, of all clients and of one; nothing if no link knows it."""
    known = [link for link in view.links if link.knows_energy]
    if not known:
        return Markup()
    heads, clients = ["method"], max(view.task.clients, 1)
    for link in known:
        name = link_name(link).replace("-", NO_BREAK)
        heads += [f"{name}, to the target", "a client", f"{name}, whole run", "a client"]
    rows = []
    for each in view.methods:
        at = reached(each, target) if each.uploads else None
        cells = []
        for link in known:
            total = each.joules.get(link.name)
            for joules in (None if total is None or at is None else total[at], None if total is None else total[-1]):
                cells += [NONE, NONE] if joules is None else [format_joules(joules), format_joules(joules / clients)]
        rows.append((_name(each), cells, each in view.front))
    caption = (
        "What the bytes take at the radios of all clients together, and of one on average: bytes times joules per "
        "byte, for each direction that the link has a figure for. Waking up, listening and waiting come besides."
    )
    return sheet(f"Energy of transmission to reach {target.words}", caption, heads, rows)


def format_joules(joules: float) -> str:
    """Write an energy with its unit."""
    unit, factor = next(((unit, factor) for unit, factor in _JOULES if joules >= 0.9995 * factor), ("mJ", 1e-3))
    number = joules / factor
    return f"{number:,.0f} {unit}" if number >= 99.95 else f"{number:.3g} {unit}"


def link_facts(links: Sequence[Link]) -> Markup:
    """The rates behind the times."""
    heads = ["link", "up", "down", "round trip", "energy of a byte up, down", "source"]
    rows = []
    for link in links:
        energy = ", ".join(
            format_joules(joules) if joules else NONE for joules in (link.up_j_per_byte, link.down_j_per_byte)
        )
        cells = [rate(link.up_bps), rate(link.down_bps), delay(link.rtt_s), energy, link.source or "the experiment"]
        rows.append((tag("span", link_name(link)), cells, False))
    return sheet("Links", "", heads, rows, kind="settings")


def overview(views: Sequence[TaskView]) -> Markup:
    """Final accuracies by task and method, whichever are more going downwards."""
    run = [view for view in views if view.methods]
    names = list(dict.fromkeys(each.name for view in run for each in view.methods))
    cells = {(view.slug, each.name): _accuracy(each) for view in run for each in view.methods}
    tasks = {view.slug: _link_to(view) for view in run}
    if len(names) > len(run):
        heads: list[str] = ["method", *(view.task.name or view.title for view in run)]
        rows = [(tag("span", n), [cells.get((slug, n), NONE) for slug in tasks], False) for n in names]
    else:
        heads = ["task", *names]
        rows = [(link, [cells.get((slug, n), NONE) for n in names], False) for slug, link in tasks.items()]
    return sheet("Final accuracy over the grid, %", "Mean over seeds ± standard deviation.", heads, rows)


def settings(values: Mapping[str, Any], title: str, caption: str = "") -> Markup:
    """Keys and values."""
    rows = [(tag("code", key), [_plain(value)], False) for key, value in flat(values).items()]
    return sheet(title, caption, ["key", "value"], rows, kind="settings")


def methods(view: TaskView, title: str) -> Markup:
    """All keys of the methods: a column for each that differs, and one line for those that do not."""
    configs = [to_config(each.summary.method) for each in view.methods]
    keys = [key for key in configs[0] if key != "name"]
    varying = [key for key in keys if key == "codec" or len({_plain(c[key]) for c in configs}) > 1]
    same = "; ".join(f"{key} = {_plain(configs[0][key])}" for key in keys if key not in varying)
    rows = [
        (_name(each), [_plain(config[key]) for key in varying], False)
        for each, config in zip(view.methods, configs, strict=True)
    ]
    caption = f"The same for all: {same}." if same else ""
    return sheet(title, caption, ["method", *varying], rows, kind="settings")


def sheet(
    title: str,
    caption: str,
    heads: Sequence[str],
    rows: Sequence[tuple[Markup, Sequence[str], bool]],
    kind: str = "numbers",
) -> Markup:
    """A table in a box that scrolls on its own; rows are a heading, cells, and whether to mark it."""
    head = tag("tr", *(tag("th", text, scope="col") for text in heads))
    body = (
        tag(
            "tr", tag("th", name, scope="row"), *(tag("td", cell) for cell in cells), class_="front" if marked else None
        )
        for name, cells, marked in rows
    )
    notes = [tag("p", caption, class_="note")] if caption else []
    table = tag("table", tag("caption", title), tag("thead", head), tag("tbody", *body), class_=kind)
    return join(tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=title), *notes)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def _time(view: MethodView, at: int, link: Timed) -> str:
    seconds = view.seconds.get(link.name)
    return NONE if seconds is None else format_duration(float(seconds[at]))


def _name(view: MethodView) -> Markup:
    return join(tag("span", str(view.number), class_="number"), " ", view.name)


def _link_to(view: TaskView) -> Markup:
    return tag("a", view.task.name or view.title, href=f"#{view.slug}")


def _accuracy(view: MethodView) -> str:
    spread = "" if view.summary.accuracy_spread is None else f" ± {100 * view.summary.accuracy_spread:.1f}"
    return f"{100 * view.summary.accuracy:.1f}{spread}"


def _spread_words(view: TaskView) -> str:
    return " ± standard deviation over seeds" if len(view.seeds) > 1 else ", one seed"


def _points(view: MethodView) -> str:
    points = view.summary.points
    if not points:
        return NONE
    mean = format_points(fmean(points))
    return mean if len(points) == 1 else f"{mean} ({format_points(min(points))}, {format_points(max(points))})"


def _ratio(view: MethodView) -> str:
    ratio = view.summary.ratio
    if ratio is None:
        return "never uploaded"
    return f"{ratio:,.0f}" if ratio >= 9.95 else f"{ratio:.3g}"


def _plain(value: Any) -> str:
    """A value as in TOML, where that is a plain one."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_plain(entry)}" for key, entry in value.items()) or NONE
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or NONE
    return str(value) or NONE
