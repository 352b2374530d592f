"""Files in, files out: results are found and read, the page and its figures are written."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedcomp.errors import ConfigError, FedcompError
from fedcomp_clients.files import replacing
from fedcomp_simulations.report.drawing import MADE_BY
from fedcomp_simulations.report.figures import MANY_TASKS, Picture, draw_overview, draw_task
from fedcomp_simulations.report.page import Chapter, Section, page
from fedcomp_simulations.report.targets import check_target, target_of
from fedcomp_simulations.report.views import view_task
from fedcomp_simulations.results import Results, load_results
from fedcomp_simulations.saving import naming

RESULTS, PAGE, FIGURES = "results.json", "report.html", "figures"
_MODE = 0o644


def write_report(folder: Path, target: str | float | None = None, out: Path | None = None) -> Path:
    """Write report.html and figures/*.png about the results in a folder, and return the path of the page.

    Args:
        folder: holds results.json, or folders that do, however deep: then the page has a chapter for each.
        target: the accuracy to reach: 0.85, or a share of float32's such as "95 %", which is the default.
        out: where to write; None: into the folder.

    Raises ConfigError for a target or a folder that will not do, FedcompError for results that cannot be read, OSError
    if a file cannot be written; files are there whole or not at all. Figures of a former report in the same place go.
    """
    check_target(target)
    found = find_results(folder)
    names = [str(path.parent.relative_to(folder)) for path in found] if len(found) > 1 else [""]
    chapters = []
    for path, name, base in zip(found, names, _slugs(names), strict=True):
        try:
            chapters.append(_chapter(load_results(path), name, base, target))
        except ConfigError:
            raise
        except FedcompError as error:
            raise error if str(path) in str(error) else FedcompError(f"{path}: {error}") from error
    out = out or folder
    with naming(out / FIGURES):
        (out / FIGURES).mkdir(parents=True, exist_ok=True)
    pictures = {f"{picture.name}.png": picture.png for chapter in chapters for picture in _pictures(chapter)}
    for name, png in pictures.items():
        _write(out / FIGURES / name, png)
    _write(out / PAGE, page(chapters).encode("utf-8", "replace"))  # names of files may be no UTF-8
    for path in (out / FIGURES).glob("*.png"):
        if path.name not in pictures and _is_figure(path):
            path.unlink(missing_ok=True)  # of another grid, whose page this one has replaced
    return out / PAGE


def find_results(folder: Path) -> list[Path]:
    """The results file of a folder, or else all below it."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: expected a folder with {RESULTS}, as fedcomp simulate --out leaves; it is none")
    if (folder / RESULTS).is_file():
        return [folder / RESULTS]
    found = sorted(path for path in folder.rglob(RESULTS) if path.is_file())
    if not found:
        raise ConfigError(
            f"{folder}: expected {RESULTS} in it or below, found none; run fedcomp simulate --out {folder}"
        )
    return found


def _chapter(results: Results, name: str, base: str, target: str | float | None) -> Chapter:
    if not results.runs:
        raise FedcompError("expected runs, got none; run the experiment again")
    name = name or results.experiment
    parts = results.by_task()
    sections = []
    for number, (task, part) in enumerate(parts, 1):
        title = f"{name}: {task.name}" if task.name else name
        slug = f"{base}--{number}" if len(parts) > 1 else base
        view = view_task(title, slug, task, part)
        if not view.methods:
            sections.append(Section(view, None, ()))
            continue
        aim = target_of(view, target)
        sections.append(Section(view, aim, draw_task(view, aim, short=len(parts) > MANY_TASKS)))
    chapter = Chapter(results, name, f"{base}--all", sections)
    if len(sections) == 1:
        return chapter
    return replace(chapter, overview=draw_overview([section.view for section in sections], base))


def _pictures(chapter: Chapter) -> Sequence[Picture]:
    pictures = [picture for section in chapter.sections for picture in section.pictures]
    return [*([chapter.overview] if chapter.overview else []), *pictures]


def _slugs(names: Sequence[str]) -> list[str]:
    """The names as beginnings of file names and anchors, each another; "--" is left for what follows."""
    found: list[str] = []
    for name in names:
        plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "task"
        found.append(plain if plain not in found else f"{plain}--{len(found)}b")
    return found


def _is_figure(path: Path) -> bool:
    """Whether a report has made this file, by this name."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(1000)
    return MADE_BY.encode() in head and b"Title\0" + path.stem.encode("utf-8", "replace") in head


def _write(path: Path, data: bytes) -> None:
    with naming(path), replacing(path, _MODE) as file:
        file.write(data)
