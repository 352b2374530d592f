"""What backward operators become: operators that ONNX has and onnxruntime runs fast.

torch has such rules for most. Rules of our own replace those that it lacks, and those whose outcome is slow. Two
operators must never reach the exporter, which mistranslates them silently (onnxscript 0.7.2): `nll_loss_forward`, whose
total weight becomes 1, so that mean gradients are not divided by the batch size, and training-mode batch norm, whose
statistics become the running ones.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from fedcomp.errors import ExportError

aten = torch.ops.aten
_WIDE = 16  # input channels from which on one product for each place of the kernel is faster than one for all
Ints = Sequence[int]

_TORCHS = """
    nll_loss_forward nll_loss2d_forward native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _batch_norm_with_update native_group_norm native_dropout
    native_dropout_backward huber_loss smooth_l1_loss _log_softmax_backward_data _softmax_backward_data
    nll_loss_backward
    nll_loss2d_backward threshold_backward tanh_backward sigmoid_backward gelu_backward silu_backward hardtanh_backward
    hardswish_backward hardsigmoid_backward elu_backward leaky_relu_backward softplus_backward mish_backward
    mse_loss_backward smooth_l1_loss_backward huber_loss_backward native_layer_norm_backward native_group_norm_backward
    native_batch_norm_backward batch_norm_backward embedding_dense_backward slice_backward select_backward
    log_sigmoid_backward _prelu_kernel_backward glu_backward
"""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The rules: operator to function."""
    named = [getattr(aten, name) for name in _TORCHS.split()]
    return {
        **get_decompositions(named),
        aten.convolution_backward.default: convolution_backward,
        aten.max_pool2d_with_indices_backward.default: max_pool_backward,
        aten.avg_pool2d_backward.default: average_pool_backward,
        aten.threshold_backward.default: threshold_backward,
        aten.hardtanh_backward.default: hardtanh_backward,
    }


def threshold_backward(gradient: Tensor, x: Tensor, threshold: float) -> Tensor:
    """Of ReLU: a product, since `Where` is slow in onnxruntime."""
    return gradient * (x > threshold).to(gradient.dtype)


def hardtanh_backward(gradient: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    """Of ReLU6 and its like, as a product too."""
    return gradient * ((x > low) & (x < high)).to(gradient.dtype)


def convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Ints | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias."""
    axes = weight.dim() - 2
    kernel = list(weight.shape[2:])
    stride, padding, dilation = (_pair(value, axes) for value in (stride, padding, dilation))
    of_x = of_weight = of_bias = None
    if wanted[0] and transposed:
        of_x = aten.convolution(gradient, weight, None, stride, padding, dilation, False, [0] * axes, groups)
    elif wanted[0]:
        rest = [
            x.shape[2 + i]
            - ((gradient.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (kernel[i] - 1) + 1)
            for i in range(axes)
        ]
        of_x = aten.convolution(gradient, weight, None, stride, padding, dilation, True, rest, groups)
    if wanted[1]:
        small, large = (gradient, x) if transposed else (x, gradient)
        of_weight = _weight_gradient(small, large, kernel, stride, padding, dilation, groups)
    if wanted[2]:
        of_bias = gradient.sum([0, *range(2, 2 + axes)])
    return of_x, of_weight, of_bias


def _weight_gradient(
    x: Tensor, gradient: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> Tensor:
    """Multiply the gradient with shifted inputs, channels first, so that one product sums over the whole batch."""
    batch, outputs, *places = gradient.shape
    each, length = x.shape[1] // groups, math.prod(places)
    if any(padding):
        x = aten.constant_pad_nd(x, [size for pad in reversed(padding) for size in (pad, pad)])
    x = x.transpose(0, 1)  # (channels, batch, ...)
    flat = gradient.transpose(0, 1).reshape(groups, outputs // groups, batch * length)
    shifted = [x]
    for i, size in enumerate(kernel):
        starts = [start * dilation[i] for start in range(size)]
        last = (places[i] - 1) * stride[i] + 1
        shifted = [aten.slice(part, 2 + i, start, start + last, stride[i]) for part in shifted for start in starts]
    columns = [part.reshape(groups, each, batch * length) for part in shifted]
    if groups > 1:
        together = torch.cat(columns, 1)  # (groups, kernel x each, batch x length)
        across = flat.reshape(groups, -1, 1) if outputs == groups else flat.mT
        found = torch.bmm(together, across).reshape(groups, len(columns), each, -1).permute(0, 3, 2, 1)
    elif each < _WIDE:
        together = torch.cat([column[0] for column in columns])
        found = (flat[0] @ together.mT).reshape(outputs, len(columns), each).mT
    else:
        found = torch.stack([flat[0] @ column[0].mT for column in columns], -1)
    return found.reshape(outputs, each, *kernel)


def max_pool_backward(
    gradient: Tensor, x: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil: bool, indices: Tensor
) -> Tensor:
    """Of max pooling: by comparing the places of a window if windows do not overlap, else by scattering."""
    batch, channels, height, width = x.shape
    down, right = _pair(kernel)
    stride, padding, dilation = _pair(stride) if len(stride) else [down, right], _pair(padding), _pair(dilation)
    rows, columns = gradient.shape[2:]
    if stride == [down, right] and not any(padding) and rows * down <= height and columns * right <= width:
        return _unpool_by_comparing(gradient, x, down, right)
    flat = torch.zeros_like(x).reshape(batch, channels, height * width)
    flat = flat.scatter_add(2, indices.flatten(2), gradient.flatten(2))
    return flat.reshape(batch, channels, height, width)


def _unpool_by_comparing(gradient: Tensor, x: Tensor, down: int, right: int) -> Tensor:
    """Give the gradient to the first of the largest values of each window, as torch does."""
    height, width = x.shape[2:]
    rows, columns = gradient.shape[2:]
    whole = x[:, :, : rows * down, : columns * right]
    best, *others = [whole[:, :, i::down, j::right] for i in range(down) for j in range(right)]
    larger = []
    for other in others:
        larger.append((other > best).to(gradient.dtype))
        best = torch.maximum(best, other)
    spread = []
    for won in reversed(larger):
        spread.append(gradient * won)
        gradient = gradient - spread[-1]
    spread = [gradient, *reversed(spread)]
    lines = [torch.stack(spread[i : i + right], -1).flatten(3) for i in range(0, len(spread), right)]
    return _grow(torch.stack(lines, 3).flatten(2, 3), height, width)


def average_pool_backward(
    gradient: Tensor,
    x: Tensor,
    kernel: Ints,
    stride: Ints,
    padding: Ints,
    ceil: bool,
    count_pad: bool,
    divisor: int | None,
) -> Tensor:
    """Of average pooling: by repeating if windows do not overlap, else by a transposed convolution."""
    batch, channels, height, width = x.shape
    kernel = _pair(kernel)
    stride, padding = _pair(stride) if len(stride) else kernel, _pair(padding)
    if ceil or not (count_pad or padding == [0, 0]):
        raise ExportError("avg_pool2d with ceil_mode or count_include_pad=False cannot be exported; pad before pooling")
    rows, columns = gradient.shape[2:]
    size = divisor or kernel[0] * kernel[1]
    if stride == kernel and padding == [0, 0]:
        each = (gradient / size).reshape(batch, channels, rows, 1, columns, 1)
        spread = each.expand(batch, channels, rows, kernel[0], columns, kernel[1])
        return _grow(spread.reshape(batch, channels, rows * kernel[0], columns * kernel[1]), height, width)
    rest = [x.shape[2 + i] - ((gradient.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + kernel[i]) for i in (0, 1)]
    ones = torch.full((channels, 1, *kernel), 1.0 / size)
    found: Tensor = aten.convolution(gradient, ones, None, stride, padding, [1, 1], True, rest, channels)
    return found


def _grow(x: Tensor, height: int, width: int) -> Tensor:
    """Pad with zeros at the bottom and on the right, to a size that the windows did not reach."""
    missing = [0, width - x.shape[3], 0, height - x.shape[2]]
    return aten.constant_pad_nd(x, missing) if any(missing) else x


def _pair(value: Ints, axes: int = 2) -> list[int]:
    values = list(value)
    return values * axes if len(values) == 1 else values
