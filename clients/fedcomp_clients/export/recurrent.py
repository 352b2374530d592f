"""GRU and LSTM layers as loops: a graph whose size does not depend on the length of the sequence.

Traced as they are, these layers become a chain of operators for every position, and their backward pass one product of
matrices per position for the gradient of the weights. Here the loops hold only what depends on the position before; all
else is done for all positions at once:

    GRU     r, z = sigma(a_rz + U_rz h)   n = tanh(a_n + r (U_n h + b))   h' = n + z (h - n)
    LSTM    i, f, o = sigma(..)   g = tanh(..)   of a + U h               c' = f c + i g     h' = o tanh(c')

Backward, the gradient of every gate is that of h' (or c') times a factor known before the loop.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


@torch.library.custom_op("fedcomp::gru", mutates_args=())
def gru_loop(
    gates: Tensor, inputs: Tensor, state: Tensor, of_gates: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return states, r and z, n, and U_n h + b, each for all positions.

    gates `(positions, batch, 2 units)` and inputs `(positions, batch, units)` are what comes from the input.
    """
    found = []
    for gate, given in zip(gates, inputs, strict=True):
        both = torch.sigmoid(torch.addmm(gate, state, of_gates.T))
        reset, update = both.chunk(2, 1)
        inner = torch.addmm(bias, state, weight.T)
        new = torch.tanh(given + reset * inner)
        state = new + update * (state - new)
        found.append((state, both, new, inner))
    states, both, new, inner = (torch.stack(column) for column in zip(*found, strict=True))
    return states, both, new, inner


@gru_loop.register_fake
def _(
    gates: Tensor, inputs: Tensor, state: Tensor, of_gates: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(inputs), torch.empty_like(gates), torch.empty_like(inputs), torch.empty_like(inputs)


@torch.library.custom_op("fedcomp::gru_backward", mutates_args=())
def gru_loop_backward(
    gradients: Tensor, factors: Tensor, updates: Tensor, weight: Tensor, zeros: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the states and of U h + b for all positions, and that of the first state."""
    later = zeros
    found = []
    for given, factor, update in reversed(list(zip(gradients, factors, updates, strict=True))):
        here = given + later
        through = torch.cat((here, here, here), 1) * factor
        later = torch.addmm(here * update, through, weight)
        found.append((here, through))
    here, through = (torch.stack(column) for column in zip(*reversed(found), strict=True))
    return here, through, later


@gru_loop_backward.register_fake
def _(
    gradients: Tensor, factors: Tensor, updates: Tensor, weight: Tensor, zeros: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(gradients), torch.empty_like(factors), torch.empty_like(gradients[0])


@torch.library.custom_op("fedcomp::lstm", mutates_args=())
def lstm_loop(
    gates: Tensor, inputs: Tensor, state: Tensor, cell: Tensor, of_gates: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return states, cells, gates i, f, o, and g, each for all positions.

    gates `(positions, batch, 3 units)` and inputs `(positions, batch, units)` are what comes from the input.
    """
    found = []
    for gate, given in zip(gates, inputs, strict=True):
        three, new = (
            torch.sigmoid(torch.addmm(gate, state, of_gates.T)),
            torch.tanh(torch.addmm(given, state, weight.T)),
        )
        i, f, o = three.chunk(3, 1)
        cell = f * cell + i * new
        state = o * torch.tanh(cell)
        found.append((state, cell, three, new))
    states, cells, three, new = (torch.stack(column) for column in zip(*found, strict=True))
    return states, cells, three, new


@lstm_loop.register_fake
def _(
    gates: Tensor, inputs: Tensor, state: Tensor, cell: Tensor, of_gates: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(inputs), torch.empty_like(inputs), torch.empty_like(gates), torch.empty_like(inputs)


@torch.library.custom_op("fedcomp::lstm_backward", mutates_args=())
def lstm_loop_backward(
    gradients: Tensor, of_cells: Tensor, to_cells: Tensor, factors: Tensor, kept: Tensor, weight: Tensor, zeros: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of a + U h for all positions, and those of the first state and cell."""
    state, cell = zeros, zeros
    found = []
    for given, of_cell, to_cell, factor, keep in reversed(
        list(zip(gradients, of_cells, to_cells, factors, kept, strict=True))
    ):
        here = given + state
        cell = cell + of_cell + here * to_cell
        through = torch.cat((cell, cell, here, cell), 1) * factor
        state = through @ weight
        cell = cell * keep
        found.append(through)
    return torch.stack(found[::-1]), state, cell


@lstm_loop_backward.register_fake
def _(
    gradients: Tensor, of_cells: Tensor, to_cells: Tensor, factors: Tensor, kept: Tensor, weight: Tensor, zeros: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(factors), torch.empty_like(gradients[0]), torch.empty_like(gradients[0])


class _Gru(torch.autograd.Function):
    """One layer in one direction, after its input weights."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Map inputs `(positions, batch, 3 units)` to states `(positions, batch, units)`."""
        both = 2 * state.shape[1]
        gates = inputs[..., :both] + bias[:both]
        states: Tensor
        states, gates, new, inner = gru_loop(
            gates, inputs[..., both:].contiguous(), state, weight[:both], weight[both:], bias[both:]
        )
        ctx.save_for_backward(states, gates, new, inner, state, weight)
        return states

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of inputs, state, weight and bias."""
        states, gates, new, inner, state, weight = ctx.saved_tensors
        reset, update = gates.chunk(2, 2)
        before = torch.cat((state.unsqueeze(0), states[:-1]))
        of_new = (1 - update) * (1 - new * new)
        of_reset = of_new * inner * reset * (1 - reset)
        of_update = (before - new) * update * (1 - update)
        factors = torch.cat((of_reset, of_update, of_new * reset), 2)
        here, through, first = gru_loop_backward(gradients[0], factors, update, weight, torch.zeros_like(state))
        of_inputs = torch.cat((through[..., : 2 * state.shape[1]], here * of_new), 2)
        rows = through.flatten(0, 1)
        return of_inputs, first, rows.T @ before.flatten(0, 1), rows.sum(0)


class _Lstm(torch.autograd.Function):
    """One layer in one direction, after its input weights and biases."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, inputs: Tensor, state: Tensor, cell: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Map what comes from the input, for i, f, o `(positions, batch, 3 units)` and for g, to states and cells."""
        three = gates.shape[2]
        states, cells, gates, new = lstm_loop(gates, inputs, state, cell, weight[:three], weight[three:])
        ctx.save_for_backward(states, cells, gates, new, state, cell, weight)
        return states, cells

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of both inputs, state, cell and weight."""
        states, cells, gates, g, state, cell, weight = ctx.saved_tensors
        i, f, o = gates.chunk(3, 2)
        bent = torch.tanh(cells)
        before = torch.cat((cell.unsqueeze(0), cells[:-1]))
        factors = torch.cat((g * i * (1 - i), before * f * (1 - f), bent * o * (1 - o), i * (1 - g * g)), 2)
        through, of_state, of_cell = lstm_loop_backward(
            gradients[0], gradients[1], o * (1 - bent * bent), factors, f.contiguous(), weight, torch.zeros_like(state)
        )
        earlier = torch.cat((state.unsqueeze(0), states[:-1]))
        of_weight = through.flatten(0, 1).T @ earlier.flatten(0, 1)
        return (*through.split((gates.shape[2], state.shape[1]), 2), of_state, of_cell, of_weight)


class AsLoops(TorchFunctionMode):
    """While it is entered, `nn.GRU` and `nn.LSTM` become loops; layers with projections stay as they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("gru", "lstm") and len(args) == 9 and isinstance(args[2], list | tuple):
            weights, biased, layers, _dropout, _train, both_ways = args[2:8]
            if len(weights) == (4 if biased else 2) * layers * (2 if both_ways else 1) and args[0].dim() == 3:
                return _layers(name, *args)
        return func(*args, **kwargs)


def _layers(
    kind: str,
    x: Tensor,
    start: Any,
    weights: list[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    train: bool,
    both_ways: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """What `torch.gru` and `torch.lstm` return, as a chain of our layers."""
    starts = start if kind == "lstm" else (start,)
    x = x.transpose(0, 1) if batch_first else x
    each, ways = (4 if biased else 2), (2 if both_ways else 1)
    last: list[list[Tensor]] = []
    for layer in range(layers):
        outputs = []
        for way in range(ways):
            index = layer * ways + way
            own = weights[index * each : (index + 1) * each]
            results = _layer(kind, x.flip(0) if way else x, [values[index] for values in starts], own)
            last.append([values[-1] for values in results])
            outputs.append(results[0].flip(0) if way else results[0])
        x = torch.cat(outputs, 2) if both_ways else outputs[0]
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, train)
    ends = [torch.stack(values) for values in zip(*last, strict=True)]
    return (x.transpose(0, 1) if batch_first else x, *ends)


def _layer(kind: str, x: Tensor, starts: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:
    of_input, of_state, *biases = weights
    zeros = of_state.new_zeros(len(of_state))
    input_bias, state_bias = biases or (zeros, zeros)
    if kind == "gru":
        inputs = torch.nn.functional.linear(x, of_input, input_bias)
        return (_Gru.apply(inputs, starts[0], of_state, state_bias),)  # type: ignore[no-untyped-call]
    of_input, of_state, bias = map(_tanh_last, (of_input, of_state, input_bias + state_bias))
    three = len(bias) // 4 * 3
    gates = torch.nn.functional.linear(x, of_input[:three], bias[:three])
    inputs = torch.nn.functional.linear(x, of_input[three:], bias[three:])
    return _Lstm.apply(gates, inputs, *starts, of_state)  # type: ignore[no-untyped-call,no-any-return]


def _tanh_last(rows: Tensor) -> Tensor:
    """Put torch's order of the gates, i, f, g, o, into ours, i, f, o, g, of which three are sigmoids in a row."""
    i, f, g, o = rows.chunk(4)
    return torch.cat((i, f, o, g))
