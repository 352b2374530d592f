"""What a report times runs on: the experiment's own links and clients, and presets as if all clients had that one."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from fedcomp.errors import ConfigError, FedcompError
from fedcomp_simulations.config import from_config
from fedcomp_simulations.fleet import Fleet
from fedcomp_simulations.links import PRESETS, Link, joules, link_seconds
from fedcomp_simulations.results import RunResult, Task

OWN = "own"


@dataclass(frozen=True)
class Timed:
    """Links that runs are timed on.

    Attributes:
        name: of a preset, or OWN.
        links: that clients have; empty where only training takes time.
        fleet: of the experiment, with its training times, stragglers and deadline; None: all clients have the one link
            and only transmission counts.
        clients: how many the experiment has.
    """

    name: str
    links: tuple[Link, ...]
    fleet: Fleet | None = None
    clients: int = 0

    @property
    def own(self) -> bool:
        """Whether these are the experiment's links."""
        return self.fleet is not None

    @property
    def knows_energy(self) -> bool:
        """Whether some link has joules per byte."""
        return any(link.up_j_per_byte or link.down_j_per_byte for link in self.links)

    def seconds(self, run: RunResult) -> list[float]:
        """Seconds from the beginning of a run to the end of each of its rounds."""
        on = self.links[0] if self.fleet is None else self.fleet.clock(self.clients, run.seed)
        return link_seconds(run.exchanges, on)

    def joules(self, run: RunResult) -> list[float]:
        """Energy of all clients' bytes from the beginning of a run to the end of each of its rounds."""
        fleet, clients, seed = self.fleet, self.clients, run.seed
        on = self.links[0] if fleet is None else lambda client: fleet.link_of(client, clients, seed)
        return list(accumulate(joules([asked], on) for asked in run.exchanges))


def timed_on(task: Task) -> tuple[Timed, ...]:
    """What the runs of a task are timed on, its own links first if it has any, or clients that take time to train.

    A task whose clients are all on a preset, with nothing else that takes time, is timed on that preset only once.
    Raises FedcompError, which names the key, for settings that cannot be those of a fleet.
    """
    fleet = _fleet_of(task)
    presets = tuple(Timed(link.name, (link,)) for link in PRESETS.values())
    if not fleet.mix and not fleet.compute_s:
        return presets
    links = tuple(link for link, _ in fleet.mix)
    simple = len(links) == 1 and PRESETS.get(links[0].name) == links[0] and fleet.transmits_only
    name = links[0].name if simple else OWN
    return (Timed(name, links, fleet, task.clients), *(timed for timed in presets if timed.name != name))


def _fleet_of(task: Task) -> Fleet:
    settings = task.settings.get("fleet", {})
    try:
        if not isinstance(settings, Mapping):
            raise ConfigError(f"fleet: expected a table, got {settings!r}")
        return from_config(settings, Fleet, prefix="fleet.")
    except ConfigError as error:  # of the results, not of what the user has just asked for
        raise FedcompError(f"settings of task {task.name!r}: {error}; run the experiment again") from error
