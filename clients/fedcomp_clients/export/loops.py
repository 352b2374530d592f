# mypy: disable-error-code="misc, arg-type, has-type"
"""The loops of `recurrent.py` in ONNX: one `Scan` each, over the positions."""

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import FLOAT, graph, opset18, script, values

_OWN = values.Opset("fedcomp", 1)


@script(_OWN, default_opset=opset18)
def gru(
    gates: FLOAT, inputs: FLOAT, state: FLOAT, of_gates: FLOAT, weight: FLOAT, bias: FLOAT
) -> tuple[FLOAT, FLOAT, FLOAT, FLOAT]:
    """States, r and z, n, and U_n h + b."""

    @graph()
    def body(h, gate, given):  # type: ignore[no-untyped-def]
        both = opset18.Sigmoid(opset18.Gemm(h, of_gates, gate, transB=1))
        reset, update = opset18.Split(both, num_outputs=2, axis=1)
        inner = opset18.Gemm(h, weight, bias, transB=1)
        new = opset18.Tanh(opset18.Add(given, opset18.Mul(reset, inner)))
        following = opset18.Add(new, opset18.Mul(update, opset18.Sub(h, new)))
        kept = opset18.Identity(following)
        return following, kept, both, new, inner

    _, states, both, new, inner = opset18.Scan(state, gates, inputs, num_scan_inputs=2, body=body)
    return states, both, new, inner


@script(_OWN, default_opset=opset18)
def gru_backward(
    gradients: FLOAT, factors: FLOAT, updates: FLOAT, weight: FLOAT, zeros: FLOAT
) -> tuple[FLOAT, FLOAT, FLOAT]:
    """Gradients of the states, of U h + b, and of the first state."""

    @graph()
    def body(later, given, factor, update):  # type: ignore[no-untyped-def]
        here = opset18.Add(given, later)
        through = opset18.Mul(opset18.Concat(here, here, here, axis=1), factor)
        before = opset18.Gemm(through, weight, opset18.Mul(here, update))
        return before, here, through

    first, here, through = opset18.Scan(
        zeros, gradients, factors, updates,
        num_scan_inputs=3, scan_input_directions=[1, 1, 1], scan_output_directions=[1, 1], body=body,
    )  # fmt: skip
    return here, through, first


@script(_OWN, default_opset=opset18)
def lstm(
    gates: FLOAT, inputs: FLOAT, state: FLOAT, cell: FLOAT, of_gates: FLOAT, weight: FLOAT
) -> tuple[FLOAT, FLOAT, FLOAT, FLOAT]:
    """States, cells, gates i, f, o, and g."""

    @graph()
    def body(h, c, gate, given):  # type: ignore[no-untyped-def]
        three = opset18.Sigmoid(opset18.Gemm(h, of_gates, gate, transB=1))
        new = opset18.Tanh(opset18.Gemm(h, weight, given, transB=1))
        i, f, o = opset18.Split(three, num_outputs=3, axis=1)
        following = opset18.Add(opset18.Mul(f, c), opset18.Mul(i, new))
        out = opset18.Mul(o, opset18.Tanh(following))
        return out, following, opset18.Identity(out), opset18.Identity(following), three, new

    _, _, states, cells, three, new = opset18.Scan(state, cell, gates, inputs, num_scan_inputs=2, body=body)
    return states, cells, three, new


@script(_OWN, default_opset=opset18)
def lstm_backward(
    gradients: FLOAT, of_cells: FLOAT, to_cells: FLOAT, factors: FLOAT, kept: FLOAT, weight: FLOAT, zeros: FLOAT
) -> tuple[FLOAT, FLOAT, FLOAT]:
    """Gradients of a + U h, and of the first state and cell."""

    @graph()
    def body(state, cell, given, of_cell, to_cell, factor, keep):  # type: ignore[no-untyped-def]
        here = opset18.Add(given, state)
        now = opset18.Add(opset18.Add(cell, of_cell), opset18.Mul(here, to_cell))
        through = opset18.Mul(opset18.Concat(now, now, here, now, axis=1), factor)
        return opset18.MatMul(through, weight), opset18.Mul(now, keep), through

    of_state, of_cell, through = opset18.Scan(
        zeros, zeros, gradients, of_cells, to_cells, factors, kept,
        num_scan_inputs=5, scan_input_directions=[1, 1, 1, 1, 1], scan_output_directions=[1], body=body,
    )  # fmt: skip
    return through, of_state, of_cell


def translations() -> dict[Any, Callable[..., Any]]:
    """Which operator of torch becomes which loop."""
    own = torch.ops.fedcomp
    return {
        own.gru.default: gru,
        own.gru_backward.default: gru_backward,
        own.lstm.default: lstm,
        own.lstm_backward.default: lstm_backward,
    }
