"""From a traced graph to an ONNX file."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
import torch
from torch import Tensor
from torch.fx import GraphModule

from fedcomp.errors import ExportError
from fedcomp_clients.export.loops import translations
from fedcomp_clients.export.rewrite import multiply_transposed

_RANDOM = ("Random", "Bernoulli", "Dropout", "Multinomial")


def to_onnx(
    graph: GraphModule, arguments: tuple[Tensor, ...], inputs: list[str], outputs: list[str], opset: int
) -> ir.Model:
    """Translate to ONNX. Raises ExportError naming the operator that has no translation."""
    free = {0: torch.export.Dim.AUTO}
    shapes = tuple(free if i >= len(arguments) - 2 else None for i in range(len(arguments)))
    with _quiet():
        try:
            program = torch.export.export(graph, arguments, dynamic_shapes=shapes, strict=False)
            made = torch.onnx.export(
                program,
                dynamo=True,
                optimize=False,
                verbose=False,
                input_names=inputs,
                output_names=outputs,
                opset_version=opset,
                custom_translation_table=translations(),
            )
            assert made is not None
            made.optimize()
        except Exception as error:
            raise ExportError(_explain(error)) from error
    model = made.model
    multiply_transposed(model.graph)
    _separate(model, outputs)
    _strip(model)
    if any(
        value.name == "x" and value.shape is not None and isinstance(value.shape[0], int)
        for value in model.graph.inputs
    ):
        raise ExportError("the batch dimension became fixed in the graph; take the batch size from x.shape[0]")
    return model


def draws_random(model: ir.Model) -> bool:
    """Whether a graph draws random numbers."""
    return any(node.op_type.startswith(_RANDOM) for node in ir.traversal.RecursiveGraphIterator(model.graph))


def save(model: ir.Model, path: Path) -> None:
    """Write a graph, weights and all, into one file."""
    ir.save(model, path)


def _separate(model: ir.Model, names: list[str]) -> None:
    """Give each output a value of its own: equal gradients come as one, a buffer that stays the same as its input."""
    taken = {id(value) for value in model.graph.inputs}
    for i in range(len(names)):
        value = model.graph.outputs[i]
        if id(value) in taken or value.producer() is None:
            if (constant := model.graph.initializers.pop(str(value.name), None)) is not None:
                constant.name = f"constant/{constant.name}"  # its name is wanted for the output
                model.graph.initializers.add(constant)
            copied = ir.node("Identity", [value])
            model.graph.append(copied)
            copied.outputs[0].shape, copied.outputs[0].type = value.shape, value.type
            model.graph.outputs[i] = value = copied.outputs[0]
        taken.add(id(value))
    for value, name in zip(model.graph.outputs, names, strict=True):
        value.name = name


def _strip(model: ir.Model) -> None:
    """Remove stack traces and the like: most of the bytes of a small graph."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        node.metadata_props.clear()
        node.doc_string = None
        for output in node.outputs:
            output.metadata_props.clear()
    for value in [*model.graph.inputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()
    model.metadata_props.clear()
    model.graph.metadata_props.clear()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's progress and warnings from the user: what matters is checked."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _explain(error: BaseException) -> str:
    """The operator that has no translation, or else what went wrong first."""
    deepest, found = error, error.__cause__ or error.__context__
    while found is not None:
        if "No ONNX function found" in str(found):
            return f"{_first_line(found)}; use another layer or function"
        deepest, found = found, found.__cause__ or found.__context__
    return f"cannot become ONNX: {type(deepest).__name__}: {_first_line(deepest)}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
