"""Tracing: a function of tensors becomes a graph of plain operators whose batch size is free.

The function runs once on fake tensors of which only dimension 0 of x and y is symbolic. Differentiation happens inside
the function, so the graph holds forward and backward pass alike.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedcomp.errors import ExportError
from fedcomp_clients.export.decompositions import decompositions
from fedcomp_clients.export.recurrent import AsLoops

Function = Callable[..., tuple[Tensor, ...]]


def trace(function: Function, model: nn.Module, arguments: tuple[Tensor, ...]) -> GraphModule:
    """Record what `function` does to tensors, x and y, the last two of any batch size.

    Raises ExportError, naming module or operator, if it does not come down to plain operators.
    """
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    fakes = [_fake(mode, value, free=i >= len(arguments) - 2) for i, value in enumerate(arguments)]
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        where = stack.enter_context(_whereabouts(model))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        stack.enter_context(enable_python_dispatcher())  # or C++ recurrent layers bake in the batch size
        stack.enter_context(mode)
        stack.enter_context(AsLoops())
        recorder = make_fx(
            function, decomposition_table=decompositions(), tracing_mode="real", _allow_non_fake_inputs=True
        )
        try:
            graph = recorder(*fakes)
        except ExportError:
            raise
        except Exception as error:  # whatever the user's code or torch raise
            raise ExportError(_explain(error, where)) from error
    fixed = [str(value) for value in shapes.replacements.values() if not str(value).startswith("s")]
    if fixed:
        raise ExportError(
            f"the model works for a batch of {fixed[0]} only; take the batch size from x.shape[0], not from len(x), "
            "and compare it with nothing"
        )
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _fake(mode: FakeTensorMode, value: Tensor, free: bool) -> Tensor:
    if not free:
        return mode.from_tensor(value, static_shapes=True)
    sizes = [DimDynamic.DUCK] + [DimDynamic.STATIC] * (value.dim() - 1)  # DUCK: x and y share their symbol
    return mode.from_tensor(value, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


@contextmanager
def _whereabouts(model: nn.Module) -> Iterator[list[str]]:
    """Keep the names of the modules that are running, outermost first."""
    running: list[str] = []
    handles = []
    for name, module in model.named_modules():
        shown = f"{name or 'model'} ({type(module).__name__})"
        handles.append(module.register_forward_pre_hook(lambda *_, shown=shown: running.append(shown)))
        handles.append(module.register_forward_hook(lambda *_: running.pop() and None))
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()


def _explain(error: Exception, where: list[str]) -> str:
    place = f"in {where[-1]}" if where else "in the loss or the backward pass"
    kind = type(error).__name__
    if "DataDependent" in kind or "data-dependent" in str(error).lower():
        return f"{place}: the code depends on values of tensors, which a graph cannot; use torch.where or the like"
    first = str(error).strip().partition("\n")[0]
    return f"{place}: cannot be traced: {kind}: {first}"
