"""Which network is trained: one of a few kinds, fitted to the form of the data. Knows nothing of torch.

The kinds are `mlp`, `cnn` for images, `cnn1d` for series, and `gru` and `transformer` for rows of symbols.
"""

from dataclasses import dataclass

from fedcomp.errors import ConfigError
from fedcomp_simulations.config import one_of
from fedcomp_simulations.datasets.form import Form

UNITS = {"cnn": 64, "cnn1d": 64, "gru": 96, "mlp": 64, "transformer": 48}  # where `hidden` is not given
ALIASES = {"imu-cnn": "cnn1d"}
NORMS = ("batch", "group", "none")
HEADS = 4  # of the transformer, each of an even width
MIN_SIDE = 4  # pixels: the images are halved twice
MIN_STEPS = 31  # of a series: what the last convolution's one output sees
MIN_STEPS_BATCH = 35  # with batch normalization, which cannot do with one value of a channel in a batch of one
MAX_HIDDEN = 65_536

_TEXT = Form((50,), 77, symbols=77, everywhere=True)
_IMAGE = Form((784,), 10)
_SHIPPED = {"cnn": _IMAGE, "cnn1d": Form((6, 100), 7), "gru": _TEXT, "mlp": _IMAGE, "transformer": _TEXT}


@dataclass(frozen=True)
class Network:
    """A kind of network and what it is fitted to.

    Attributes:
        model: the kind, or another name of it.
        form: of the data.
        hidden: units of the hidden layer, and the width of a transformer; 0: what the kind has by default.
        norm: what follows the convolutions: "none", "group" or "batch", the last with running statistics.

    Raises ConfigError if there is no such network, or if it does not take such data.
    """

    model: str
    form: Form
    hidden: int = 0
    norm: str = "none"

    def __post_init__(self) -> None:
        check_model(self.model)
        one_of("norm", self.norm, NORMS)
        if not 0 <= self.hidden <= MAX_HIDDEN:
            raise ConfigError(f"hidden: expected from 1 to {MAX_HIDDEN} units, or 0 for the default, got {self.hidden}")
        if self.norm != "none" and not self.kind.startswith("cnn"):
            raise ConfigError(f"norm: only the models cnn and cnn1d have normalization layers, not {self.model!r}")
        if self.kind == "transformer" and self.units % (2 * HEADS):
            raise ConfigError(f"hidden: a transformer takes multiples of {2 * HEADS}, got {self.units}")
        if wanted := self._unfit():
            fit = ", ".join(kind for kind in UNITS if _fits(kind, self.form)) or "none"
            raise ConfigError(f"model {self.model!r} takes {wanted}, got {self.form}; models for these data: {fit}")

    @property
    def kind(self) -> str:
        """The one name of this kind."""
        return ALIASES.get(self.model, self.model)

    @property
    def units(self) -> int:
        """Units of the hidden layer."""
        return self.hidden or UNITS[self.kind]

    @classmethod
    def shipped(cls, model: str) -> "Network":
        """The network for the data that this kind is shipped with: MNIST, Shakespeare or the IMU."""
        check_model(model)
        return cls(model, _SHIPPED[ALIASES.get(model, model)])

    def _unfit(self) -> str:
        """What the kind takes, if these data are something else."""
        if not _fits(self.kind, self.form):
            return _TAKES[self.kind]
        if self.kind == "cnn1d" and self.norm == "batch" and self.form.shape[1] < MIN_STEPS_BATCH:
            return f'at least {MIN_STEPS_BATCH} steps with norm = "batch" (less with "group" or "none")'
        return ""


def available() -> tuple[str, ...]:
    """Names of models."""
    return tuple(sorted({*UNITS, *ALIASES}))


def check_model(name: str) -> None:
    """Raise ConfigError unless there is such a model."""
    one_of("model", name, available())


_TAKES = {
    "cnn": f"images of at least {MIN_SIDE}x{MIN_SIDE} pixels, as channels x height x width or as square rows",
    "cnn1d": f"series, as channels x steps, of at least {MIN_STEPS} steps",
    "gru": "rows of symbols",
    "mlp": "features",
    "transformer": "rows of symbols",
}


def _fits(kind: str, form: Form) -> bool:
    if form.symbols:
        return _TAKES[kind] == _TAKES["gru"] and len(form.shape) == 1
    if form.everywhere or kind in ("gru", "transformer"):
        return False
    if kind == "cnn":
        return form.image is not None and min(form.image[1:]) >= MIN_SIDE
    return kind == "mlp" or (len(form.shape) == 2 and form.shape[1] >= MIN_STEPS)
