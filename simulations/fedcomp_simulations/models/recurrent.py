"""A recurrent network for rows of symbols."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedcomp_simulations.models.embedding import embedding
from fedcomp_simulations.network import Network


class Gru(nn.Module):
    """One layer of gated units; for Shakespeare it predicts the next of 77 characters: 41,533 parameters."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.everywhere = network.form.everywhere
        self.embedding = embedding(network.form.symbols, 16)
        self.gru = nn.GRU(16, network.units)
        self.output = nn.Linear(network.units, network.form.classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map rows of symbols, `(batch, positions)`, to scores; the state starts at 0.

        These are `(batch, positions, classes)`, or `(batch, classes)` from the last state if a row has one label.
        """
        weight_ih, weight_hh, bias_ih, bias_hh = self.gru.parameters()
        inputs = functional.linear(self.embedding(x.T), weight_ih, bias_ih)  # (positions, batch, 3 units)
        states: Tensor = _GatedUnits.apply(inputs, weight_hh, bias_hh)  # type: ignore[no-untyped-call]
        scores: Tensor = self.output(states.transpose(0, 1) if self.everywhere else states[-1])
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
