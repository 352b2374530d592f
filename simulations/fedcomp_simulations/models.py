"""The networks of the shipped experiments: two for images, one for text, one for motion. None knows BatchNorm."""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fedcomp.errors import ConfigError
from fedcomp_simulations.skeleton import made_once


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
        x = functional.relu(_halve(self.conv1(x)))  # (batch, 8, 14, 14)
        x = functional.relu(_halve(self.conv2(x)))  # (batch, 16, 7, 7)
        scores: Tensor = self.output(functional.relu(self.hidden(x.flatten(1))))
        return scores


def _halve(x: Tensor) -> Tensor:
    """Max-pool 2x2; without gradients by comparing slices, which gives the same values in a tenth of the time."""
    if torch.is_grad_enabled():
        return functional.max_pool2d(x, 2)
    rows = torch.maximum(x[..., ::2, :], x[..., 1::2, :])
    return torch.maximum(rows[..., ::2], rows[..., 1::2])


class Gru(nn.Module):
    """Predicts the next of 77 characters with one layer of 96 gated units: 41,533 parameters."""

    def __init__(self) -> None:
        super().__init__()
        nothing = torch.empty(77, 16)  # to draw on the meta device would load torch's compiler, which takes a second
        self.embedding = nn.Embedding.from_pretrained(nothing, freeze=False)  # type: ignore[no-untyped-call]
        self.gru = nn.GRU(16, 96)
        self.output = nn.Linear(96, 77)

    def forward(self, x: Tensor) -> Tensor:
        """Map rows of characters, `(batch, positions)`, to scores, `(batch, positions, 77)`; the state starts at 0."""
        weight_ih, weight_hh, bias_ih, bias_hh = self.gru.parameters()
        inputs = functional.linear(self.embedding(x.T), weight_ih, bias_ih)  # (positions, batch, 288)
        states: Tensor = _GatedUnits.apply(inputs, weight_hh, bias_hh)  # type: ignore[no-untyped-call]
        scores: Tensor = self.output(states.transpose(0, 1))
        return scores


class _GatedUnits(torch.autograd.Function):
    """What `nn.GRU` computes after its input weights, in half the time on one thread.

    With gates r and z, candidate n and state h: n = tanh(inputs_n + r (U_n h + b_n)), h' = n + z (h - n).
    Backward, the gradient of every gate is that of h' times a factor that is known before the loop.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Run over inputs, `(positions, batch, 3 units)`, and return the states, `(positions, batch, units)`."""
        units = weight.shape[1]
        states = inputs.new_zeros(len(inputs) + 1, inputs.shape[1], units)
        hidden = torch.empty_like(inputs)  # becomes r, z and U_n h + b_n
        candidates = torch.empty_like(states[1:])
        gates, resets, updates = hidden[..., : 2 * units], hidden[..., :units], hidden[..., units : 2 * units]
        columns = (states[:-1], hidden, gates, inputs[..., : 2 * units], hidden[..., 2 * units :], resets, updates)
        targets = (inputs[..., 2 * units :], candidates, states[1:])
        transposed = weight.T
        for state, all3, gate, from_input, recurrent, reset, update, candidate_input, candidate, following in zip(
            *(column.unbind() for column in (*columns, *targets)), strict=True
        ):
            torch.addmm(bias, state, transposed, out=all3)
            gate.add_(from_input).sigmoid_()
            torch.addcmul(candidate_input, reset, recurrent, out=candidate).tanh_()
            torch.lerp(candidate, state, update, out=following)
        ctx.save_for_backward(hidden, candidates, states, weight)
        return states[1:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of inputs, weight and bias."""
        hidden, candidate, states, weight = ctx.saved_tensors
        reset, update, recurrent = hidden.chunk(3, dim=2)
        before = states[:-1]
        of_candidate = (1 - update) * (1 - candidate * candidate)
        of_reset = of_candidate * recurrent * reset * (1 - reset)
        of_update = (before - candidate) * update * (1 - update)
        factors = torch.stack((of_reset, of_update, of_candidate * reset), dim=2)  # (positions, batch, 3, units)
        at_state = gradients[0].clone()  # (positions, batch, units); what comes from later is added in the loop
        through = torch.empty_like(factors)  # the gradients of U h + b
        later = torch.zeros_like(at_state[0])
        columns = (at_state, at_state.unsqueeze(2), factors, through, through.flatten(2), update)
        for here, spread, factor, back, flat, kept in reversed(
            list(zip(*(column.unbind() for column in columns), strict=True))
        ):
            here.add_(later)
            torch.mul(factor, spread, out=back)
            later = torch.addmm(here * kept, flat, weight)
        rows = through.flatten(2)  # (positions, batch, 3 units)
        of_inputs = torch.cat((rows[..., : -weight.shape[1]], at_state * of_candidate), dim=2)
        rows = rows.flatten(0, 1)
        return of_inputs, rows.T @ before.flatten(0, 1), rows.sum(dim=0)


class ImuCnn(nn.Module):
    """Three convolutions over time, their mean over time and two dense layers: 26,879 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(6, 24, 7, stride=2)
        self.conv2 = nn.Conv1d(24, 48, 5, stride=2)
        self.conv3 = nn.Conv1d(48, 64, 5)
        self.hidden = nn.Linear(64, 64)
        self.output = nn.Linear(64, 7)

    def forward(self, x: Tensor) -> Tensor:
        """Map windows of motion, `(batch, 6, 100)`, to class scores, `(batch, 7)`."""
        x = functional.relu(self.conv1(x))  # (batch, 24, 47)
        x = functional.relu(self.conv2(x))  # (batch, 48, 22)
        x = functional.relu(self.conv3(x)).mean(dim=2)  # (batch, 64)
        scores: Tensor = self.output(functional.relu(self.hidden(x)))
        return scores


_MODELS: dict[str, type[nn.Module]] = {"cnn": Cnn, "gru": Gru, "imu-cnn": ImuCnn, "mlp": Mlp}


def available() -> tuple[str, ...]:
    """Names that `build` knows."""
    return tuple(sorted(_MODELS))


def build(name: str, arrays: dict[str, NDArray[np.float32]]) -> nn.Module:
    """Make the named model around the given arrays, which it uses without a copy and will write to."""
    model = _empty(name)
    model.load_state_dict({key: torch.from_numpy(array) for key, array in arrays.items()}, assign=True)
    return model


def initial_arrays(name: str, seed: int) -> dict[str, NDArray[np.float32]]:
    """Draw the start of a model: weights ~ N(0, 2/fan_in), in the last layer N(0, 1/fan_in), biases 0.

    A recurrent matrix is orthogonal times 0.9, in each of its gates. The same seed gives the same start.
    """
    rng = np.random.default_rng(7 + seed)
    shapes = {key: tuple(value.shape) for key, value in _empty(name).state_dict().items()}
    arrays: dict[str, NDArray[np.float32]] = {}
    for key, shape in shapes.items():
        if len(shape) == 1:
            arrays[key] = np.zeros(shape, np.float32)
            continue
        if key.endswith("weight_hh_l0"):
            arrays[key] = np.concatenate([_orthogonal(shape[1], rng) for _ in range(shape[0] // shape[1])])
            continue
        fan_in = math.prod(shape[1:])
        scale = math.sqrt((1 if key == "output.weight" else 2) / fan_in)
        drawn = rng.normal(0, scale, (fan_in, shape[0]))  # input first, as most papers write W
        arrays[key] = np.ascontiguousarray(drawn.T.reshape(shape), dtype=np.float32)
    return arrays


def _orthogonal(size: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Draw an orthogonal matrix times 0.9, uniformly: QR with a positive diagonal of R."""
    q, r = np.linalg.qr(rng.normal(size=(size, size)))
    return (0.9 * q * np.sign(np.diag(r))).astype(np.float32)


@made_once
def _empty(name: str) -> nn.Module:
    """Make a network on the meta device: no memory, and no random start for weights that are replaced at once."""
    with torch.device("meta"):
        return _find(name)()


def _find(name: str) -> type[nn.Module]:
    if name not in _MODELS:
        raise ConfigError(f"unknown model {name!r}; available: {', '.join(available())}")
    return _MODELS[name]
