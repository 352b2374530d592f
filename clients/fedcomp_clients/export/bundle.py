"""Writing a training bundle, see `fedcomp_clients.bundle` for what is in it."""

import copy
import dataclasses
import importlib.metadata
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

import fedcomp
from fedcomp.errors import ExportError
from fedcomp_clients.bundle import read_bundle, write_manifest
from fedcomp_clients.export.check import check as compare
from fedcomp_clients.export.graph import draws_random, save, to_onnx
from fedcomp_clients.export.model import Loss, Step, class_dimension, dtype_name, make_step
from fedcomp_clients.export.still import still_function, still_model
from fedcomp_clients.export.trace import Function, trace
from fedcomp_clients.manifest import (
    DATA_DTYPES,
    EVAL,
    FILES,
    INITIAL,
    MANIFEST,
    SGD,
    TASKS,
    TRAIN,
    Data,
    Manifest,
)
from fedcomp_clients.manifest import Tensor as Entry

_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime")
_OPSETS = (18, 23)
_PLAIN = SGD()


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        nodes: operators of train.onnx, as a measure of its size.
    """

    folder: Path
    manifest: Manifest
    nodes: int


def export_training_bundle(
    model: nn.Module,
    loss: Loss | str,
    example: tuple[Tensor, Tensor],
    out: Path | str,
    *,
    optimizer: SGD = _PLAIN,
    task: str | None = None,
    opset: int = 18,
    check: bool = True,
) -> Exported:
    """Write what a device needs to train a model without torch, once it has been found to do what torch does.

    Args:
        model: takes x and returns one tensor. It is not changed. Parameters with `requires_grad=False` stay as they
            are, and cost no gradient. In a model in training mode, modules that are in evaluation mode stay so.
        loss: maps output and y to a mean over the batch, in plain torch; or "cross_entropy", "mse", "smooth_l1".
        example: x and y of at least two samples, which should differ: 8 random ones are good. Everything but their
            number is fixed.
        out: folder of the bundle. An earlier bundle there is replaced at the very end.
        optimizer: momentum, weight decay, nesterov; the learning rate is told when training.
        task: "classification" (y are labels, correct answers are counted) or "regression"; by default the former if y
            are integers.
        opset: version of ONNX's operators.
        check: compare two steps and an evaluation with torch, at batch sizes 4 and 7. Dropout is off meanwhile.

    Raises ExportError if something cannot be exported, naming it, or does not do what torch does; nothing is written.
    """
    _accept_optimizer(optimizer)
    x, y = _accept_example(example)
    task = _accept_task(task, y)
    if opset not in range(_OPSETS[0], _OPSETS[1] + 1):
        raise ExportError(f"opset: expected {_OPSETS[0]} to {_OPSETS[1]}, got {opset}")
    folder = Path(out)
    _accept_folder(folder)
    step = make_step(_in_training(model), loss, task)
    classes = _probe(step, x, y)
    train = _graph(step, step.train, step.results, x, y, opset)
    evaluation = dataclasses.replace(step, model=copy.deepcopy(step.model).eval())
    evaluate = _graph(evaluation, evaluation.evaluate, ["output", "loss", "correct"], x, y, opset)
    manifest = Manifest(
        tensors=_entries(step),
        x=Data(tuple(x.shape[1:]), dtype_name(x)),
        y=Data(tuple(y.shape[1:]), dtype_name(y)),
        task=task,
        classes=classes,
        optimizer=optimizer,
        random=draws_random(train),
        opset=opset,
        inputs={TRAIN: _inputs(train), EVAL: _inputs(evaluate)},
        files={},
        versions={name: importlib.metadata.version(name) for name in _PACKAGES} | {"fedcomp": fedcomp.__version__},
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch, "new")
        manifest = _write(made, manifest, train, evaluate, step)
        if check and manifest.random:
            still, graph = _still(step, x, y, opset)
            other = Path(scratch, "still")
            _write(other, dataclasses.replace(manifest, random=False), graph, evaluate, still)
            compare(still, read_bundle(other), x, y)
        elif check:
            manifest = write_manifest(made, dataclasses.replace(manifest, check=compare(step, read_bundle(made), x, y)))
        read_bundle(made)
        _put(made, folder, Path(scratch, "old"))
    return Exported(folder, manifest, len(train.graph))


def _in_training(model: nn.Module) -> nn.Module:
    """Copy the model and put it into training mode, unless it is, with parts that shall not be."""
    copied = copy.deepcopy(model)
    return copied if copied.training else copied.train()


def _accept_optimizer(optimizer: SGD) -> None:
    if not (0 <= optimizer.momentum < 1 and 0 <= optimizer.weight_decay < math.inf):
        raise ExportError(f"optimizer: expected 0 <= momentum < 1 and a weight decay of at least 0, got {optimizer}")
    if optimizer.nesterov and not optimizer.momentum:
        raise ExportError("optimizer: nesterov needs a momentum above 0")


def _accept_example(example: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if not (isinstance(example, tuple | list) and len(example) == 2):
        raise ExportError("example: expected x and y; models with several inputs cannot be exported, stack them in x")
    for name, value in zip(("x", "y"), example, strict=True):
        if not isinstance(value, Tensor) or value.dim() == 0:
            raise ExportError(f"example: expected a tensor of samples for {name}, got {type(value).__name__}")
        if dtype_name(value) not in DATA_DTYPES:
            raise ExportError(f"example: {name} is {dtype_name(value)}, expected one of {', '.join(DATA_DTYPES)}")
    x, y = (value.detach() for value in example)
    if len(x) != len(y) or len(x) < 2:
        raise ExportError(f"example: expected x and y of at least two samples each, got {len(x)} and {len(y)}")
    return x, y


def _accept_task(task: str | None, y: Tensor) -> str:
    if task is None:
        return "regression" if y.is_floating_point() else "classification"
    if task not in TASKS:
        raise ExportError(f"task: expected {' or '.join(TASKS)}, got {task!r}")
    if task == "classification" and y.is_floating_point():
        raise ExportError(f"classification: expected integer labels in y, got {dtype_name(y)}")
    return task


def _accept_folder(folder: Path) -> None:
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {MANIFEST, *FILES}:
        return  # empty, or a bundle
    if folder.exists() or folder.is_symlink():
        raise ExportError(f"{folder} exists and is no training bundle; choose another folder")


def _probe(step: Step, x: Tensor, y: Tensor) -> int | None:
    """Run the model once as it is. Returns the number of classes, if there are any."""
    model = copy.deepcopy(step.model)
    try:
        with torch.no_grad():
            output = model(x)
            loss = step.loss(output, y) if isinstance(output, Tensor) else None
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        raise ExportError(f"the model or the loss fails on the example: {' '.join(str(error).split())}") from error
    if loss is None:
        raise ExportError(f"expected the model to return a tensor, got {type(output).__name__}; wrap it")
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise ExportError(f"expected the loss to be one number, got {_described(loss)}; use its mean")
    return output.shape[class_dimension(output, y)] if step.task == "classification" else None


def _described(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _graph(step: Step, function: Function, outputs: list[str], x: Tensor, y: Tensor, opset: int) -> ir.Model:
    arguments = (*step.tensors.values(), x, y)
    names = [*(f"t/{name}" for name in step.tensors), "x", "y"]
    return to_onnx(trace(function, step.model, arguments), arguments, names, outputs, opset)


def _still(step: Step, x: Tensor, y: Tensor, opset: int) -> tuple[Step, ir.Model]:
    """The step as it would be without dropout, and its graph."""
    still = dataclasses.replace(step, model=still_model(step.model))
    graph = _graph(still, still_function(still.train), still.results, x, y, opset)
    if draws_random(graph):
        raise ExportError("the step draws random numbers beside dropout, so it cannot be checked; pass check=False")
    return still, graph


def _inputs(model: ir.Model) -> tuple[str, ...]:
    return tuple(str(value.name) for value in model.graph.inputs)


def _entries(step: Step) -> tuple[Entry, ...]:
    groups = {"parameter": step.parameters, "frozen": step.frozen, "buffer": step.buffers}
    return tuple(
        Entry(name, tuple(value.shape), dtype_name(value), role)
        for role, group in groups.items()
        for name, value in group.items()
    )


def _write(folder: Path, manifest: Manifest, train: ir.Model, evaluate: ir.Model, step: Step) -> Manifest:
    """Write a bundle into a new folder."""
    folder.mkdir()
    save(train, folder / TRAIN)
    save(evaluate, folder / EVAL)
    initial: dict[str, Any] = {name: value.numpy() for name, value in step.tensors.items()}
    np.savez(folder / INITIAL, **initial)
    return write_manifest(folder, manifest)


def _put(made: Path, folder: Path, old: Path) -> None:
    """Move a bundle to its place; an earlier one goes, but only once the new one is there."""
    if folder.exists():
        folder.rename(old)
    try:
        made.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
