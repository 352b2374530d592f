"""The networks of the shipped experiments. Both take flat rows of 784 pixels and know no BatchNorm."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fedcomp.errors import ConfigError


class Mlp(nn.Module):
    """784-64-10 with ReLU: 50,890 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(784, 64)
        self.output = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map rows of pixels, `(batch, 784)`, to class scores, `(batch, 10)`."""
        scores: Tensor = self.output(functional.relu(self.hidden(x)))
        return scores


class Cnn(nn.Module):
    """Two 5x5 convolutions with pooling and two dense layers: 54,314 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 5, padding=2)
        self.conv2 = nn.Conv2d(8, 16, 5, padding=2)
        self.hidden = nn.Linear(784, 64)
        self.output = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map rows of pixels, `(batch, 784)`, to class scores, `(batch, 10)`."""
        x = x.reshape(-1, 1, 28, 28)
        x = functional.relu(functional.max_pool2d(self.conv1(x), 2))  # (batch, 8, 14, 14)
        x = functional.relu(functional.max_pool2d(self.conv2(x), 2))  # (batch, 16, 7, 7)
        scores: Tensor = self.output(functional.relu(self.hidden(x.flatten(1))))
        return scores


_MODELS: dict[str, type[nn.Module]] = {"cnn": Cnn, "mlp": Mlp}


def available() -> tuple[str, ...]:
    """Names that `build` knows."""
    return tuple(sorted(_MODELS))


def build(name: str, arrays: dict[str, NDArray[np.float32]]) -> nn.Module:
    """Make the named model around the given arrays, which it uses without a copy and will write to."""
    with torch.device("meta"):  # no memory and no random start for weights that are replaced at once
        model = _find(name)()
    model.load_state_dict({key: torch.from_numpy(array) for key, array in arrays.items()}, assign=True)
    return model


def initial_arrays(name: str, seed: int) -> dict[str, NDArray[np.float32]]:
    """Draw the start of a model: weights ~ N(0, 2/fan_in), in the last layer N(0, 1/fan_in), biases 0."""
    rng = np.random.default_rng(7 + seed)
    with torch.device("meta"):
        shapes = {key: tuple(value.shape) for key, value in _find(name)().state_dict().items()}
    arrays: dict[str, NDArray[np.float32]] = {}
    for key, shape in shapes.items():
        if len(shape) == 1:
            arrays[key] = np.zeros(shape, np.float32)
            continue
        fan_in = math.prod(shape[1:])
        scale = math.sqrt((1 if key == "output.weight" else 2) / fan_in)
        drawn = rng.normal(0, scale, (fan_in, shape[0]))  # input first, as most papers write W
        arrays[key] = np.ascontiguousarray(drawn.T.reshape(shape), dtype=np.float32)
    return arrays


def _find(name: str) -> type[nn.Module]:
    if name not in _MODELS:
        raise ConfigError(f"unknown model {name!r}; available: {', '.join(available())}")
    return _MODELS[name]
