"""The rules that backward operators become, one by one, without an export."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from fedcomp_clients.export import decompositions
from fedcomp_clients.export.recurrent import AsLoops


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize(("layers", "both_ways", "biased"), [(1, False, True), (2, True, True), (1, True, False)])
def test_loops_compute_what_recurrent_layers_do(
    kind: type[nn.GRU | nn.LSTM], layers: int, both_ways: bool, biased: bool
) -> None:
    torch.manual_seed(0)
    layer = kind(3, 5, layers, bias=biased, batch_first=True, bidirectional=both_ways)
    x = torch.randn(4, 6, 3, requires_grad=True)
    found = []
    for loops in (False, True):
        if loops:
            with AsLoops():
                output, last = layer(x)
        else:
            output, last = layer(x)
        ends = last if isinstance(last, tuple) else (last,)
        total = (output * torch.arange(output.numel()).reshape(output.shape)).sum() + sum(
            end.square().sum() for end in ends
        )
        gradients = torch.autograd.grad(total, [x, *layer.parameters()])
        found.append([output, *ends, *gradients])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: functional.max_pool2d(x, 2),
    "max with a rest": lambda x: functional.max_pool2d(x[..., :7, :5], (3, 2)),
    "max overlapping": lambda x: functional.max_pool2d(x, 3, 2, 1),
    "average": lambda x: functional.avg_pool2d(x, 2),
    "average with a rest": lambda x: functional.avg_pool2d(x[..., :7], 3),
    "average overlapping": lambda x: functional.avg_pool2d(x, 3, 2, 1),
}


@pytest.mark.parametrize("pool", POOLS)
def test_rules_of_pools(pool: str) -> None:
    """Ties too: values are whole numbers, so that most windows have several largest."""
    torch.manual_seed(0)
    x = torch.randint(3, (2, 3, 8, 8)).float().requires_grad_()
    check_rules(POOLS[pool], x)


CONVOLUTIONS = {
    "plain": nn.Conv2d(4, 6, 3),
    "many channels": nn.Conv2d(18, 6, (3, 2), padding=1),
    "stride": nn.Conv2d(4, 6, 3, 2, 1),
    "dilation": nn.Conv2d(4, 6, 3, 1, 2, 2),
    "groups": nn.Conv2d(4, 6, 3, padding=1, groups=2),
    "depthwise": nn.Conv2d(4, 4, 3, 2, 1, groups=4),
    "depthwise, two each": nn.Conv2d(4, 8, 3, groups=4),
    "transposed": nn.ConvTranspose2d(4, 6, 3, 2, 1, 1),
    "transposed groups": nn.ConvTranspose2d(4, 6, 3, groups=2),
    "one axis": nn.Conv1d(4, 6, 5, 2, 1),
    "three axes": nn.Conv3d(4, 6, 2),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_rules_of_convolutions(case: str) -> None:
    layer = CONVOLUTIONS[case]
    torch.manual_seed(0)
    axes = layer.weight.dim() - 2
    x = torch.randn(3, layer.in_channels, *[8, 7, 6][:axes], requires_grad=True)
    check_rules(layer, x, *layer.parameters())


def check_rules(function: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor) -> None:
    """Compare gradients by our rules with torch's."""

    def gradients(x: Tensor) -> tuple[Tensor, ...]:
        output = function(x)
        weights = torch.arange(output.numel()).reshape(output.shape).to(x.dtype) / output.numel()
        return torch.autograd.grad((output * weights).sum(), [x, *parameters])

    traced = make_fx(gradients, decomposition_table=decompositions.decompositions())(x)
    called = {str(node.target) for node in traced.graph.nodes}
    assert not any(("pool" in name and "backward" in name) or "convolution_backward" in name for name in called)
    for ours, theirs in zip(traced(x), gradients(x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
