"""What is exported: the tensors of a model, and the two functions of them that become graphs.

Both functions take all tensors in order, then x and y. Only buffers that the state dict does not name
(`persistent=False`) stay inside, as constants.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedcomp.errors import ExportError
from fedcomp_clients.manifest import TENSOR_DTYPES

Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES = ("cross_entropy", "mse", "smooth_l1")
_PARAMETER_DTYPES = ("float32",)


def named_loss(name: str) -> Loss:
    """Look up a loss: cross_entropy (classes in the last dimension of the scores), mse or smooth_l1."""
    losses: dict[str, Loss] = {
        "cross_entropy": _cross_entropy,
        "mse": functional.mse_loss,
        "smooth_l1": functional.smooth_l1_loss,
    }
    if name not in losses:
        raise ExportError(f"unknown loss {name!r}; expected {', '.join(losses)} or a function of output and y")
    return losses[name]


def _cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), y.flatten())


@dataclass(frozen=True)
class Step:
    """A model with a loss, as functions of tensors.

    Attributes:
        parameters: trained tensors by name; then frozen ones, then buffers, each in torch's order.
    """

    model: nn.Module
    loss: Loss
    task: str
    parameters: dict[str, Tensor]
    frozen: dict[str, Tensor]
    buffers: dict[str, Tensor]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors in the order of the manifest."""
        return self.parameters | self.frozen | self.buffers

    @property
    def results(self) -> list[str]:
        """Names of what `train` returns."""
        return [*(f"g/{name}" for name in self.parameters), *(f"b/{name}" for name in self.buffers), "loss", "correct"]

    def train(self, *flat: Tensor) -> tuple[Tensor, ...]:
        """Map tensors, x and y to gradients, new buffers, loss and the number of correct answers."""
        *given, x, y = flat
        named = dict(zip(self.tensors, given, strict=True))
        weights = {name: named[name].detach().requires_grad_() for name in self.parameters}
        buffers = {name: named[name].clone() for name in self.buffers}  # BatchNorm writes into them
        with torch.enable_grad():
            output = functional_call(self.model, named | weights | buffers, (x,))
            loss = self.loss(output, y)
            found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        gradients = [
            torch.zeros_like(weight) if gradient is None else gradient
            for gradient, weight in zip(found, weights.values(), strict=True)
        ]
        return (*gradients, *(buffer.detach() for buffer in buffers.values()), *self._judge(loss, output, y))

    def evaluate(self, *flat: Tensor) -> tuple[Tensor, ...]:
        """Map tensors, x and y to output, loss and the number of correct answers."""
        *given, x, y = flat
        with torch.no_grad():
            output = functional_call(self.model, dict(zip(self.tensors, given, strict=True)), (x,))
            return (output, *self._judge(self.loss(output, y), output, y))

    def _judge(self, loss: Tensor, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.task == "regression":
            return loss.detach(), torch.zeros((), dtype=torch.int64)
        return loss.detach(), (output.detach().argmax(class_dimension(output, y)) == y).sum()


def class_dimension(output: Tensor, y: Tensor) -> int:
    """Find the dimension of the scores that goes over the classes: the last, or the second as in torch's losses."""
    if output.shape[:-1] == y.shape:
        return output.dim() - 1
    if output.dim() == y.dim() + 1 and output.shape[2:] == y.shape[1:]:
        return 1
    raise ExportError(
        f"classification: expected scores of shape {(*y.shape, 'classes')} for labels {tuple(y.shape)}, "
        f'got {tuple(output.shape)}; pass task="regression" if y is no class'
    )


def make_step(model: nn.Module, loss: Loss | str, task: str) -> Step:
    """Sort the tensors of a model. Raises ExportError for types that a bundle cannot hold."""
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not trained:
        raise ExportError("the model has no parameter to train; at least one needs requires_grad=True")
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    kept = model.state_dict(keep_vars=True)
    buffers = {name: value for name, value in model.named_buffers() if name in kept}
    groups = [{name: value.detach().clone() for name, value in group.items()} for group in (trained, frozen, buffers)]
    for name, value in (groups[0] | groups[1] | groups[2]).items():
        allowed = TENSOR_DTYPES if name in buffers else _PARAMETER_DTYPES
        if dtype_name(value) not in allowed or value.device.type != "cpu":
            raise ExportError(
                f"tensor {name!r}: expected {' or '.join(allowed)} on the CPU, got {dtype_name(value)} on "
                f"{value.device}; convert it, or register a constant buffer with persistent=False"
            )
    return Step(model, named_loss(loss) if isinstance(loss, str) else loss, task, *groups)


def dtype_name(value: Tensor) -> str:
    """What numpy calls the dtype of a tensor."""
    return str(value.dtype).removeprefix("torch.")
