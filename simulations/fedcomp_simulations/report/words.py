"""The result of a task in plain words, losses and noise included."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import numpy as np

from fedcomp_simulations.links import Link
from fedcomp_simulations.report.markup import Markup, fill, join, tag
from fedcomp_simulations.report.targets import Target, reached, yardstick
from fedcomp_simulations.report.timing import OWN, Timed
from fedcomp_simulations.report.views import ABOUT, MethodView, TaskView
from fedcomp_simulations.summary import format_bytes

NEAR = 0.5
"""Points below float32 that count as no loss."""

ALIKE = 1.1
"""Times more or fewer bytes up to which two numbers of them are about the same."""

NO_BREAK = "\u00a0"  # a space

LINKS = ("nb-iot", "lte-m", "dsl")
"""Links that figures and sentences are about, besides the experiment's own; one table has them all."""

NAMED = 5
"""Methods that a sentence names at most."""

LINK_NAMES = {
    OWN: "the experiment's own links",
    "nb-iot": "NB-IoT",
    "lte-m": "LTE-M",
    "lte-m-half": "LTE-M, half duplex",
    "dsl": "DSL",
    "gprs": "GPRS",
    "satellite-geo": "GEO satellite",
    "satellite-leo": "LEO satellite",
}

_TIMES = ((86_400.0, "day"), (3600.0, "hour"), (60.0, "min"), (1.0, "s"))


def format_duration(seconds: float) -> str:
    """Write a time with one unit: "45 s", "2.5 hours", "12 days"."""
    length, unit = next((entry for entry in _TIMES if seconds >= 0.99 * entry[0]), _TIMES[-1])
    number = seconds / length if length == 1 else max(seconds / length, 1.0)
    text = f"{number:,.0f}" if number >= 9.95 else f"{number:.2g}"
    plural = "s" if unit in ("day", "hour") and text != "1" else ""
    return f"{text}{NO_BREAK}{unit}{plural}"


def format_share(ratio: float) -> str:
    """Write how small a part is: 324 times fewer is "1/324"."""
    return f"1/{ratio:,.0f}" if ratio >= 9.95 else f"1/{ratio:.2g}"


def format_points(points: float) -> str:
    """Write a difference of accuracies with its sign."""
    return f"{round(points, 1) + 0.0:+.1f}".replace("-", "−")  # noqa: RUF001 (a minus sign; + 0.0 turns -0.0 into 0.0)


def percent(share: float) -> str:
    """Write a share with a decimal, as "87.8 %"."""
    return f"{100 * share:.1f}{NO_BREAK}%"


def size(nbytes: float) -> str:
    """Write a number of bytes with its unit."""
    return format_bytes(nbytes).replace(" ", NO_BREAK)


def link_name(link: Link | Timed) -> str:
    """The name of a link as people write it."""
    return LINK_NAMES.get(link.name, link.name)


def named_links(view: TaskView) -> list[Timed]:
    """The experiment's own links and those of LINKS, if there are times for them."""
    return [link for link in view.links if link.own or link.name in LINKS]


def rate(bps: float) -> str:
    """Write bits per second."""
    return f"{bps / 1e6:g} Mbit/s" if bps >= 1e6 else f"{bps / 1e3:g} kbit/s"


def delay(seconds: float) -> str:
    """Write the time of a round trip."""
    return f"{seconds:g} s" if seconds >= 1 else f"{1000 * seconds:g} ms"


def smallest(view: TaskView, target: Target) -> MethodView | None:
    """The compressed method with the fewest bytes per upload among those whose final accuracy is at the target.

    Of several with about as many bytes, the most accurate. One that ends at an accuracy of 0 is never good enough.
    """
    fit = [each for each in view.methods if each.compressed and each.summary.accuracy > 0]
    fit = [each for each in fit if each.summary.accuracy >= target.accuracy - 1e-12]
    least = min((each.summary.payload_per_upload for each in fit), default=0.0)
    fit = [each for each in fit if each.summary.payload_per_upload <= ABOUT * least]
    return max(fit, key=lambda each: each.summary.accuracy, default=None)


def tiles(view: TaskView, target: Target) -> list[tuple[str, str]]:
    """Figures to remember, each with what it is: share of the upload, accuracy, bytes. Empty if nothing suits."""
    best, reference = smallest(view, target), yardstick(view)
    if best is None or best.summary.ratio is None:
        return []
    upload = size(best.summary.payload_per_upload)
    full = size(best.summary.payload_per_upload * best.summary.ratio)
    accuracy = percent(best.summary.accuracy), f"accuracy, with {best.name}"
    if reference is not None and _same_seeds(best, reference):
        kept = best.summary.accuracy / reference.summary.accuracy
        accuracy = percent(kept), f"of float32's accuracy, with {best.name}"
    return [
        (format_share(best.summary.ratio), f"of {_whole(view)}"),
        accuracy,
        (upload, f"an upload instead of {full}"),
    ]


def headline(view: TaskView, target: Target) -> Markup:
    """The result in one sentence."""
    best, reference = smallest(view, target), yardstick(view)
    if best is None or best.summary.ratio is None:
        return _nothing_suits(view, target)
    if reference is None or not _same_seeds(best, reference):
        return fill(
            "{} has the smallest upload that reaches {}: {}, {} of {}, at an accuracy of {}. {}",
            _strong(best.name),
            target.words,
            size(best.summary.payload_per_upload),
            format_share(best.summary.ratio),
            _whole(view),
            percent(best.summary.accuracy),
            _not_compared(view),
        )
    return fill(
        "{} reaches {} of float32's accuracy ({} against {}) at {} of the upload: {} instead of {}.",
        _strong(best.name),
        percent(best.summary.accuracy / reference.summary.accuracy),
        percent(best.summary.accuracy),
        percent(reference.summary.accuracy),
        format_share(best.summary.ratio),
        size(best.summary.payload_per_upload),
        size(reference.summary.payload_per_upload),
    )


def remarks(view: TaskView, target: Target) -> list[Markup]:
    """What else there is to say, sentence by sentence."""
    return [
        *_lossless(view, target),
        *_most_accurate(view),
        *_below(view, target),
        *_all_bytes(view, target),
        *_on_links(view, target),
        *_noise(view),
        *_failures(view),
    ]


def _strong(text: str) -> Markup:
    return tag("strong", text)


def _same_seeds(a: MethodView, b: MethodView) -> bool:
    """Whether accuracies of the two are means over the same seeds."""
    return {run.seed for run in a.runs} == {run.seed for run in b.runs}


def _whole(view: TaskView) -> str:
    """What uploads are parts of, see Summary.ratio."""
    return "float32's upload" if view.reference is not None and view.reference.uploads else "4 bytes per parameter"


def _not_compared(view: TaskView) -> str:
    """Why accuracies are not shares of float32's."""
    if view.reference is None:
        return "There was no float32 run to compare with."
    if not view.reference.uploads:
        return "No float32 upload arrived, so there is nothing to compare with."
    if view.reference.summary.accuracy == 0:
        return "float32 itself ends at an accuracy of 0, so there is nothing to compare with."
    return "float32 was not run with the same seeds, so that their accuracies do not compare."


def _nothing_suits(view: TaskView, target: Target) -> Markup:
    compressed = [each for each in view.methods if each.compressed]
    if not compressed and all(each.uploads for each in view.methods):
        return fill("No method has shorter uploads than float32, so there is nothing to recommend.")
    if not compressed:
        return fill("No compressed method uploaded anything, so there is nothing to recommend.")
    best = max(compressed, key=lambda each: each.summary.accuracy)
    if best.summary.accuracy == 0:
        return fill("No compressed method has learned anything: all of them end at an accuracy of 0.")
    return fill(
        "No compressed method ends at {} ({}). The closest is {} with {}, at {} an upload.",
        target.words,
        percent(target.accuracy),
        _strong(best.name),
        percent(best.summary.accuracy),
        size(best.summary.payload_per_upload),
    )


def _range(points: Sequence[float]) -> str:
    """Mean points against float32, with the lowest and highest seed."""
    mean = f"{format_points(fmean(points))} points"
    return (
        mean if len(points) == 1 else f"{mean} ({format_points(min(points))} to {format_points(max(points))} by seed)"
    )


def _lossless(view: TaskView, target: Target) -> list[Markup]:
    """The price of the smallest upload, and the smallest upload without one."""
    if view.reference is None:
        return []
    best, found = smallest(view, target), []
    if best is not None and best.summary.points:
        found.append(fill("Against float32, {} is at {}.", _strong(best.name), _range(best.summary.points)))
    compressed = [each for each in view.methods if each.compressed]
    paired = [each for each in compressed if each.summary.points]
    if not paired:
        return found
    near = [each for each in paired if fmean(each.summary.points) >= -NEAR]
    least = min(near, key=lambda each: each.summary.payload_per_upload, default=None)
    if least is None:
        whose = "" if len(paired) == len(compressed) else " that shares seeds with float32"
        return [*found, fill("Every compressed method{} loses more than {} points.", whose, f"{NEAR:g}")]
    if least is best or least.summary.ratio is None:
        return [*found, fill("No smaller upload loses as little." if found else "")]
    text = "The smallest upload that loses less than {} points is that of {}: {}, {} of float32, at {}."
    bytes_up = size(least.summary.payload_per_upload)
    share = format_share(least.summary.ratio)
    return [*found, fill(text, f"{NEAR:g}", _strong(least.name), bytes_up, share, _range(least.summary.points))]


def _most_accurate(view: TaskView) -> list[Markup]:
    """The most accurate methods, compressed and not."""
    reference, found = view.reference, []
    compressed = [each for each in view.methods if each.compressed]
    if compressed:
        best = max(compressed, key=lambda each: each.summary.accuracy)
        bytes_up = size(best.summary.payload_per_upload)
        text = "The most accurate compressed method is {} with {}, at {} an upload."
        found.append(fill(text, _strong(best.name), percent(best.summary.accuracy), bytes_up))
    plain = [each for each in view.methods if each.uploads and not each.compressed and each is not reference]
    if plain and reference is not None:
        best = max(plain, key=lambda each: each.summary.accuracy)
        ahead = 100 * (best.summary.accuracy - reference.summary.accuracy)
        if ahead > NEAR:
            text = "Without compression, {} is {} points more accurate than plain float32: compare with that, too."
            found.append(fill(text, _strong(best.name), f"{ahead:.1f}"))
    return found


def _below(view: TaskView, target: Target) -> list[Markup]:
    """Who ends below the target, the worst first."""
    low = [each for each in view.methods if each.uploads and each.summary.accuracy < target.accuracy - 1e-12]
    silent = [_strong(each.name) for each in view.methods if not each.uploads]
    found = []
    if low:
        low.sort(key=lambda each: each.summary.accuracy)
        shown = [fill("{} ({})", _strong(each.name), percent(each.summary.accuracy)) for each in low[:NAMED]]
        text = "{} of {} methods end below {}, which is {}: {}."
        count = str(len(low)), str(len(view.methods))
        found.append(fill(text, *count, target.words, percent(target.accuracy), _listed(shown, len(low))))
    if silent:
        found.append(fill("Never uploaded anything: {}.", _listed(silent[:NAMED], len(silent))))
    return found


def _listed(names: Sequence[Markup], count: int) -> Markup:
    parts = [part for name in names for part in (Markup(", "), name)][1:]
    return join(*parts, f" and {count - len(names)} more" if count > len(names) else "")


def _all_bytes(view: TaskView, target: Target) -> list[Markup]:
    """What a round costs a client's link, both ways."""
    best, reference = smallest(view, target), view.reference
    if best is None or reference is None:
        return []
    own, full = best.per_exchange(), reference.per_exchange()
    if own is None or full is None or sum(own) <= 0 or sum(full) <= 0:
        return []
    return [
        fill(
            "Counting downloads and Flower's transport as well, a round moves {} on a client's link with {} ({} up, "
            "{} down) and {} with float32: {}.",
            size(sum(own)),
            _strong(best.name),
            size(own[0]),
            size(own[1]),
            size(sum(full)),
            _against(sum(full) / sum(own)),
        )
    ]


def _against(ratio: float) -> str:
    """How many bytes something takes that takes so many times fewer than another."""
    if ratio >= ALIKE:
        return f"{format_share(ratio)} of all bytes"
    return "about as many" if ratio * ALIKE >= 1 else f"{1 / ratio:,.2g} times as many"


def _on_links(view: TaskView, target: Target) -> list[Markup]:
    """How long it takes to get there, on each link."""
    best, reference = smallest(view, target), view.reference
    if best is None or (at := reached(best, target)) is None:
        return []
    twin = None if reference is None else reached(reference, target)
    rounds = fill("{} needs {} rounds", _strong(best.name), str(best.rounds[at]))
    if reference is not None and twin is not None:
        rounds = join(rounds, f", float32 {reference.rounds[twin]}")
    times, quickest = [], []
    for link in named_links(view):
        own = _time(best, target, link)
        if own is None:
            continue
        other = None if reference is None else _time(reference, target, link)
        beside = "" if other is None else f" (float32: {format_duration(other)})"
        times.append(f"{format_duration(own)} on {link_name(link)}{beside}")
        first = min(view.methods, key=lambda each: _time(each, target, link) or math.inf)
        seconds = format_duration(_time(first, target, link) or own)
        quickest.append(fill("on {} {} ({})", link_name(link), _strong(first.name), seconds))
    text = "Until {} is reached, {}."
    if not times:
        return [fill(text, target.words, rounds)]
    if view.links[0].name == OWN:
        text += f" That takes {times.pop(0)}, with training and deadlines as they are set."
    return [
        fill(text + " Transmission alone takes {}.", target.words, rounds, ", ".join(times)),
        fill("Quickest to get there: {}.", _listed(quickest, len(quickest))),
    ]


def _time(view: MethodView, target: Target, link: Timed) -> float | None:
    """Seconds until the target; None if it is not reached, or times are not recorded."""
    at = reached(view, target)
    return None if at is None or link.name not in view.seconds else float(view.seconds[link.name][at])


def _noise(view: TaskView) -> list[Markup]:
    """How far accuracies can be trusted."""
    spreads = [each.summary.accuracy_spread for each in view.methods]
    known = [100 * spread for spread in spreads if spread is not None]
    counts = sorted({len(each.runs) for each in view.methods})
    if not known:
        how = "Only one seed was run" if len(view.seeds) == 1 else "No method was run with more than one seed"
        return [fill("{}: differences below about a point may be chance. Three seeds tell more.", how)]
    seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    text = (
        "Noise: between its {} seeds, the accuracy of a method differs by ± {} points (standard deviation, median of "
        "the methods), at most ± {}. {}"
    )
    return [fill(text, seeds, f"{np.median(known):.1f}", f"{max(known):.1f}", _paired_noise(view))]


def _paired_noise(view: TaskView) -> str:
    """The noise of a comparison, which is less than that of accuracies where methods meet the same in each seed."""
    against = [each.summary.points for each in view.methods if each is not view.reference]
    spreads = [stdev(points) for points in against if len(points) > 1]
    if not spreads:
        return "Smaller differences between methods mean little."
    return (
        "All methods of a seed share its split, start and clients, so compare them by seed: the points against float32 "
        f"differ by ± {np.median(spreads):.1f} between seeds (median), at most ± {max(spreads):.1f}; smaller "
        "differences between methods mean little."
    )


def _failures(view: TaskView) -> list[Markup]:
    """What went wrong between server and clients."""
    failures = sum(each.summary.failures for each in view.methods)
    outcomes: dict[str, int] = {}
    for each in view.methods:
        for outcome, count in each.outcomes().items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
    bad = {outcome: count for outcome, count in outcomes.items() if outcome != "ok"}
    if not failures and not bad:
        return []
    if not bad:
        return [fill("{} times, a client that was asked brought nothing usable.", f"{failures:,}")]
    if (refused := failures - sum(bad.values())) > 0:  # they arrived, and the server could not use them
        bad["refused"] = refused
    detail = ", ".join(f"{count:,} {outcome}" for outcome, count in bad.items())
    text = "Of {} times that a client was asked, {} brought nothing usable: {}."
    return [fill(text, f"{sum(outcomes.values()):,}", f"{sum(bad.values()):,}", detail)]
