"""What codecs are measured on: textbook distributions, and real client updates made on the spot."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcomp import Layout
from fedcomp.errors import ConfigError
from fedcomp.layout import Vector

DEFAULT_SIZE = 1_000_000


@dataclass(frozen=True)
class Input:
    """A vector to compress, with the tensors it consists of."""

    name: str
    layout: Layout
    x: Vector


def names() -> tuple[str, ...]:
    """Inputs that `load` knows besides files."""
    return (*sorted(_SYNTHETIC), *sorted(_UPDATES))


def load(name: str, size: int = DEFAULT_SIZE) -> Input:
    """The named input, or the array in a .npy file.

    Args:
        name: one of `names()`, or a path that ends in .npy.
        size: number of values of the synthetic inputs; updates and files have their own.

    Raises ConfigError for an unknown name, or a file that holds no finite array of numbers.
    """
    if name in _SYNTHETIC:
        x = _SYNTHETIC[name](np.random.default_rng(0), size).astype(np.float32)
        return Input(name, Layout.vector(size), x)
    if name in _UPDATES:
        tensors = _UPDATES[name]()
        return Input(name, Layout.of(tensors), np.concatenate([np.ravel(values) for values in tensors.values()]))
    if name.endswith(".npy"):
        return _from_file(Path(name))
    raise ConfigError(f"unknown input {name!r}; available: {', '.join(names())}, or a file ending in .npy")


def _from_file(path: Path) -> Input:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu" or not array.size:
        raise ConfigError(f"{path}: expected an array of numbers")
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(values).all():
        raise ConfigError(f"{path}: expected finite float32 numbers, got NaN, infinite or too large ones")
    return Input(path.name, Layout.of({"x": values}), values.ravel())


_SYNTHETIC: dict[str, Callable[[np.random.Generator, int], NDArray[np.float64]]] = {
    "gauss": lambda rng, size: rng.standard_normal(size),
    "laplace": lambda rng, size: rng.laplace(0, np.sqrt(0.5), size),
    "student": lambda rng, size: rng.standard_t(3, size),
}


def _update_mlp() -> dict[str, Vector]:
    """ReLU MLP 64-1024-1024-10, torch's start, 600 of scikit-learn's digits, one epoch (1,126,410 parameters)."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    digits = load_digits()
    x = torch.from_numpy((digits.data[:600] / 16).astype(np.float32))
    y = torch.from_numpy(digits.target[:600].astype(np.int64))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )  # fmt: skip
    return _one_epoch(model, [(x[i : i + 20], y[i : i + 20]) for i in range(0, 600, 20)], lr=0.05, momentum=0.9)


def _update_cnn() -> dict[str, Vector]:
    """The CNN of the experiment mnist-cnn, one epoch of its first 200 digits (54,314 parameters)."""
    import torch

    from fedcomp_simulations import datasets, models

    data = datasets.load("mnist")
    x, y = torch.from_numpy(data.train_x[:200].copy()), torch.from_numpy(data.train_y[:200].copy())
    model = models.build("cnn", models.initial_arrays("cnn", 0))
    return _one_epoch(model, [(x[i : i + 20], y[i : i + 20]) for i in range(0, 200, 20)], lr=0.1, momentum=0.0)


def _update_rnn() -> dict[str, Vector]:
    """A character GRU (embedding 16, hidden 96), one epoch of 96 pieces of Python's own help text."""
    import torch

    text = _help_text(96 * 51)
    alphabet = sorted(set(text))
    codes = torch.tensor([alphabet.index(c) for c in text]).reshape(96, 51)
    torch.manual_seed(0)
    model = _char_gru(len(alphabet))
    batches = [(codes[i : i + 8, :-1], codes[i : i + 8, 1:]) for i in range(0, 96, 8)]
    return _one_epoch(model, batches, lr=1.0, momentum=0.0)


def _help_text(length: int) -> str:
    """English prose that every Python has: the topics of help()."""
    from pydoc_data.topics import topics

    return "".join(topics[name] for name in sorted(topics))[:length]


def _char_gru(letters: int) -> "torch.nn.Module":  # type: ignore[name-defined]  # noqa: F821
    from torch import Tensor, nn

    class CharGru(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(letters, 16)
            self.gru = nn.GRU(16, 96, batch_first=True)
            self.output = nn.Linear(96, letters)

        def forward(self, codes: Tensor) -> Tensor:
            hidden, _ = self.gru(self.embedding(codes))
            scores: Tensor = self.output(hidden)
            return scores.transpose(1, 2)  # (batch, letters, length), as cross_entropy wants them

    return CharGru()


def _one_epoch(
    model: "torch.nn.Module",  # type: ignore[name-defined]  # noqa: F821
    batches: "list[tuple[torch.Tensor, torch.Tensor]]",  # type: ignore[name-defined]  # noqa: F821
    lr: float,
    momentum: float,
) -> dict[str, Vector]:
    """What one epoch of SGD adds to the model."""
    import torch

    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    for x, y in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: (value.detach() - before[name]).numpy() for name, value in model.state_dict().items()}


_UPDATES: dict[str, Callable[[], dict[str, Vector]]] = {
    "update-cnn": _update_cnn,
    "update-mlp": _update_mlp,
    "update-rnn": _update_rnn,
}
