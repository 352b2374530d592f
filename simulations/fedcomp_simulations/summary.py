"""What results say: each method against the uncompressed runs of the same seeds."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, stdev

from fedcomp_simulations.experiment import Method
from fedcomp_simulations.results import Results, RunResult


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
    twin = next((method for method in groups if method.uncompressed), None)
    twins = {run.seed: run for run in groups.get(twin, [])} if twin is not None else {}
    reference = _mean_payload(twins.values()) or 4.0 * results.parameters
    return [_summary(method, runs, twins, reference) for method, runs in groups.items()]


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
