"""The page: everything a reader needs in one file, which asks no other server for anything."""

import base64
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import fedcomp
from fedcomp_simulations.experiment import Method
from fedcomp_simulations.report import tables, words
from fedcomp_simulations.report.figures import Picture
from fedcomp_simulations.report.markup import Markup, fill, join, tag
from fedcomp_simulations.report.targets import Target
from fedcomp_simulations.report.views import TaskView
from fedcomp_simulations.results import Results
from fedcomp_simulations.study import shipped

MOST_WARNINGS = 20

_MISSING = object()

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_GLOSSARY = (
    ("accuracy", "Share of right answers on test data that no client has trained with, from 0 to 100 %."),
    ("point", "One percent of the test data: from 85 % to 84 % is one point."),
    ("float32", "Plain federated learning without compression: 4 bytes for each parameter of the model."),
    ("round", "The server sends its model to some clients, they train, and their updates are averaged."),
    ("payload", "The bytes of an update itself, as they leave a client's program."),
    (
        "bytes on the links",
        "An estimate of what the network carries: payload, and Flower's requests and transport around it. Data plans "
        "are billed by these.",
    ),
    (
        "link time",
        "Time of transmission, from those bytes and the rates and round trips of a link: in each round until the "
        "slowest client is done. No training, no waiting for coverage, no sleep between rounds, no lost packets. On an "
        "experiment's own links, the training times and deadlines of its settings count as well.",
    ),
    ("seed", "A repetition with other random numbers: other clients take part, the model starts elsewhere."),
    (
        "±",
        "Standard deviation over seeds. All methods of a seed share its split, start and clients, so the noise of a "
        "comparison is how much the points against float32 differ between seeds, not this.",
    ),
    ("feedback", "What makes up for losses of compression, such as error feedback (ef), which sends the rest later."),
    ("residual", "What error feedback has held back so far, at one client."),
    ("NMSE", "Normalised mean squared error: the squared length of what an upload loses, by that of the update."),
)


@dataclass(frozen=True)
class Section:
    """A task on the page."""

    view: TaskView
    target: Target | None
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Chapter:
    """An experiment on the page: its tasks, and a picture of all of them if there are several."""

    results: Results
    title: str
    slug: str
    sections: Sequence[Section]
    overview: Picture | None = None


def page(chapters: Sequence[Chapter]) -> str:
    """Lay the page out, as HTML."""
    title = chapters[0].title if len(chapters) == 1 else f"{len(chapters)} experiments"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="generator", content=f"fedcomp {fedcomp.__version__}"),
        tag("title", f"{title}: which upload for how many bytes"),
        tag("style", Markup((files("fedcomp_simulations.report") / "page.css").read_text("utf-8"))),
    )
    body = tag(
        "body",
        tag("header", tag("h1", f"{title}: which upload for how many bytes"), tag("p", _purpose(), class_="what")),
        _contents(chapters),
        tag("main", *(_chapter(chapter, len(chapters)) for chapter in chapters), _glossary()),
        tag("footer", f"Made by fedcomp {fedcomp.__version__} with fedcomp report."),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _purpose() -> str:
    return (
        "Devices train a shared model and upload what they have learned. This report compares ways to make these "
        "uploads smaller: how accurate the model becomes, and how many bytes and how much time on the link it takes. "
        "All accuracies and payload bytes are measured, in a simulation with real training and real codecs."
    )


def _contents(chapters: Sequence[Chapter]) -> Markup:
    if sum(len(chapter.sections) for chapter in chapters) == 1:
        return Markup()
    entries = []
    for chapter in chapters:
        tasks = [
            tag("li", tag("a", section.view.task.name or chapter.title, href=f"#{section.view.slug}"))
            for section in chapter.sections
        ]
        if len(chapters) == 1:
            entries += tasks
        elif len(tasks) == 1:
            entries.append(tag("li", tag("a", chapter.title, href=f"#{chapter.sections[0].view.slug}")))
        else:
            entries.append(tag("li", tag("a", chapter.title, href=f"#{chapter.slug}"), tag("ul", *tasks)))
    return tag("nav", tag("h2", "Contents"), tag("ul", *entries), aria_label="Contents")


def _chapter(chapter: Chapter, chapters: int) -> Markup:
    parts: list[Markup] = []
    if chapter.overview is not None:
        title = f"{chapter.title}: all tasks" if chapters > 1 else "All tasks"
        views = [section.view for section in chapter.sections]
        parts.append(tag("h2", title, id=chapter.slug))
        parts.append(tag("div", _figure(chapter.overview), class_="figures"))
        parts.append(tables.overview(views))
    alone = chapters == 1 and len(chapter.sections) == 1
    parts += [_section(section, "The result" if alone else section.view.title) for section in chapter.sections]
    return join(*parts, _background(chapter, "" if chapters == 1 else f"{chapter.title}: "))


def _section(section: Section, title: str) -> Markup:
    view = section.view
    heading = tag("h2", title, id=view.slug)
    if section.target is None:
        return tag("section", heading, tag("p", "No run of this task has finished."))
    tiles = [tag("div", tag("dt", number), tag("dd", what)) for number, what in words.tiles(view, section.target)]
    return tag(
        "section",
        heading,
        tag("p", _setting(view), class_="what"),
        tag("dl", *tiles, class_="tiles") if tiles else "",
        tag("p", words.headline(view, section.target), class_="headline"),
        tag("ul", *(tag("li", each) for each in words.remarks(view, section.target)), class_="remarks"),
        tables.comparison(view),
        tag("div", *map(_figure, section.pictures), class_="figures"),
        tables.costs(view, section.target),
        tables.times(view, section.target),
    )


def _setting(view: TaskView) -> str:
    """The task in one line."""
    rounds = sorted({run.rounds for run in view.results.runs})
    length = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    known = view.task.settings
    what = f"{known['dataset']} with model {known['model']}, " if "dataset" in known and "model" in known else ""
    seeds = ", ".join(map(str, view.seeds))
    return (
        f"{what}{view.task.parameters:,} parameters, {view.task.clients_per_round:,} of {view.task.clients:,} clients "
        f"a round, {length} rounds, seed{'s' * (len(view.seeds) > 1)} {seeds}."
    )


def _figure(picture: Picture) -> Markup:
    data = base64.b64encode(picture.svg).decode("ascii")
    caption = tag("figcaption", tag("strong", picture.title), picture.caption)
    return tag("figure", caption, tag("img", src=f"data:image/svg+xml;base64,{data}", alt=picture.alt))


def _background(chapter: Chapter, prefix: str) -> Markup:
    """Settings, versions, warnings, and how to repeat it."""
    results = chapter.results
    tasks = [section.view.task for section in chapter.sections]
    settings = [tables.flat(task.settings) for task in tasks]
    common = {
        key: value
        for key, value in settings[0].items()
        if all(key not in task.grid for task in tasks) and all(each.get(key, _MISSING) == value for each in settings)
    }
    made = dict(results.versions) | {"engine": results.engine}
    return tag(
        "section",
        tag("h2", f"{prefix}How it was made"),
        tag("h3", "How to repeat it"),
        tag("pre", tag("code", _command(chapter))),
        tag(
            "p",
            "Bytes and accuracies of the in-process engine are the same each time with these versions on such a "
            "machine; if options of the command line changed the experiment, the settings below say to what.",
            class_="note",
        ),
        _warnings(results),
        *_methods(chapter),
        tables.settings(common, "Settings", _varied(chapter)) if common else "",
        *_links(chapter),
        tables.settings(made, "Versions and engine"),
    )


def _methods(chapter: Chapter) -> list[Markup]:
    """The methods of each task, those of several in one table."""
    groups: dict[tuple[Method, ...], list[TaskView]] = {}
    for section in chapter.sections:
        if section.view.methods:
            groups.setdefault(tuple(each.summary.method for each in section.view.methods), []).append(section.view)
    if len(groups) == 1:
        return [tables.methods(views[0], "Methods") for views in groups.values()]
    return [
        tables.methods(views[0], f"Methods, where {' or '.join(view.task.name for view in views)}")
        for views in groups.values()
    ]


def _links(chapter: Chapter) -> list[Markup]:
    links = {link: None for section in chapter.sections for timed in section.view.links for link in timed.links}
    return [tables.link_facts(list(links))] if links else []


def _varied(chapter: Chapter) -> str:
    grid = {key: None for section in chapter.sections for key in section.view.task.grid}
    return f"Varied over the tasks: {', '.join(grid)}." if grid else ""


def _command(chapter: Chapter) -> str:
    """The command that runs the experiment again."""
    results = chapter.results
    name = results.experiment if results.experiment in shipped() else f"{results.experiment}.toml"
    seeds = sorted({run.seed for run in results.runs})
    rounds = {run.rounds for run in results.runs}
    listed = f"{','.join(map(str, seeds))}{',' * (len(seeds) == 1)}" if seeds != list(range(len(seeds))) else len(seeds)
    length = f" --rounds {rounds.pop()}" if len(rounds) == 1 else ""
    grid = "".join(f" --grid {shlex.quote(each)}" for each in _grid(chapter))
    engine = "" if results.engine == "inprocess" else f" --engine {shlex.quote(results.engine)}"
    return f"fedcomp simulate {shlex.quote(name)} --seeds {listed}{length}{grid}{engine}"


def _grid(chapter: Chapter) -> list[str]:
    """The grid as options; one of the experiment's file is told again, which changes nothing."""
    found: dict[str, list[str]] = {}
    for section in chapter.sections:
        for key, value in section.view.task.grid.items():
            values = found.setdefault(key, [])
            if (text := _toml(value)) not in values:
                values.append(text)
    return [f"{key}={','.join(values)}" for key, values in found.items()]


def _toml(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _warnings(results: Results) -> Markup:
    """Each different warning once, with who had it."""
    found: dict[str, dict[str, None]] = {}
    for run in results.runs:
        for warning in run.warnings:
            found.setdefault(" ".join(warning.split()), {})[run.method.name] = None
    if not found:
        return tag("p", "The runs gave no warnings.")
    shown = [
        tag("li", fill("{}: {}", tag("strong", ", ".join(names)), warning))
        for warning, names in list(found.items())[:MOST_WARNINGS]
    ]
    if len(found) > MOST_WARNINGS:
        shown.append(tag("li", f"and {len(found) - MOST_WARNINGS} more, in results.json"))
    return join(tag("h3", "Warnings of the runs"), tag("ul", *shown, class_="remarks"))


def _glossary() -> Markup:
    entries = [part for word, meaning in _GLOSSARY for part in (tag("dt", word), tag("dd", meaning))]
    return tag("section", tag("h2", "What the words mean"), tag("dl", *entries, class_="glossary"))
