"""The networks that experiments train, and how they start."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedcomp_simulations.models.images import Cnn, Mlp
from fedcomp_simulations.models.recurrent import Gru
from fedcomp_simulations.models.series import Cnn1d
from fedcomp_simulations.models.transformer import Transformer
from fedcomp_simulations.network import Network, available
from fedcomp_simulations.skeleton import made_once

__all__ = ["Cnn", "Cnn1d", "Gru", "Mlp", "Network", "Transformer", "available", "build", "initial_arrays"]

Arrays = dict[str, NDArray[Any]]

_MODELS: dict[str, Callable[[Network], nn.Module]] = {
    "cnn": Cnn,
    "cnn1d": Cnn1d,
    "gru": Gru,
    "mlp": Mlp,
    "transformer": Transformer,
}


def build(network: Network | str, arrays: Mapping[str, NDArray[Any]]) -> nn.Module:
    """Make a network, in training mode, with a copy of the given arrays in its own dtypes.

    Flower's strategies make float64 of whole numbers, and some of weights: training stays in float32, and a counter
    of batches is cut to a whole number again. A name stands for the network of its shipped data.
    """
    model = _empty(network)
    kinds = {key: _NUMPY[value.dtype] for key, value in model.state_dict().items()}
    state = {key: torch.from_numpy(np.array(array, kinds.get(key))) for key, array in arrays.items()}
    model.load_state_dict(state, assign=True)
    return model


def initial_arrays(network: Network | str, seed: int) -> Arrays:
    """Draw the start of a network: weights ~ N(0, 2/fan_in), biases 0, scales of normalization 1.

    With N(0, 1/fan_in) start the last layer and the attention; what a transformer's blocks add starts at half that
    variance, divided by their number. A recurrent matrix is orthogonal times 0.9, in each of its gates. The same seed
    gives the same start.
    """
    rng = np.random.default_rng(7 + seed)
    return {key: _start(key, tuple(value.shape), rng) for key, value in _empty(network).state_dict().items()}


@made_once
def _empty(network: Network | str) -> nn.Module:
    """Make a network on the meta device: no memory, and no random start for weights that are replaced at once."""
    found = Network.shipped(network) if isinstance(network, str) else network
    with torch.device("meta"):
        return _MODELS[found.kind](found)


def _start(key: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    if key.endswith("num_batches_tracked"):
        return np.zeros(shape, np.int64)
    if len(shape) == 1:
        scale = key.endswith("running_var") or ("norm" in key and key.endswith("weight"))
        return np.full(shape, 1 if scale else 0, np.float32)
    if key.endswith("weight_hh_l0"):
        return np.concatenate([_orthogonal(shape[1], rng) for _ in range(shape[0] // shape[1])])
    fan_in = math.prod(shape[1:])
    drawn = rng.normal(0, math.sqrt(_gain(key) / fan_in), (fan_in, shape[0]))  # input first, as most papers write W
    return np.ascontiguousarray(drawn.T.reshape(shape), dtype=np.float32)


def _gain(key: str) -> float:
    """Variance of the weights times fan_in."""
    return next((gain for name, gain in _GAINS.items() if key.endswith(name)), 2)


_GAINS = {"output.weight": 1, "attention.weight": 1, "merge.weight": 0.25, "down.weight": 0.25}
_NUMPY: dict[torch.dtype, type[np.generic]] = {torch.float32: np.float32, torch.int64: np.int64}


def _orthogonal(size: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Draw an orthogonal matrix times 0.9, uniformly: QR with a positive diagonal of R."""
    q, r = np.linalg.qr(rng.normal(size=(size, size)))
    return (0.9 * q * np.sign(np.diag(r))).astype(np.float32)
