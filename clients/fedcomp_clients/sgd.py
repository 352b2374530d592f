"""Stochastic gradient descent in numpy: the operations of torch.optim.SGD in its order, in place.

    g = gradient + mu * (p - start)        FedProx, https://arxiv.org/abs/1812.06127
    g = g * min(1, c / (|g| + 1e-6))       clipping of the norm of all gradients together
    g = g + decay * p
    v = momentum * v + g
    p = p - lr * v                         with nesterov: p - lr * (g + momentum * v)

Tensors are worked through in blocks that stay in the cache, and gradients serve as scratch space, so that a step
allocates nothing.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import NonFiniteError
from fedcomp_clients.manifest import SGD

Vector = NDArray[np.float32]
Vectors = Mapping[str, Vector]

BLOCK = 1 << 16
"""Elements that are worked on at once: four arrays of 256 kB."""


class Optimizer:
    """What a step does to parameters, and the velocities that it remembers.

    Args:
        sgd: momentum, weight decay and nesterov.
        start: parameters that the proximal term pulls back to; they are never written.
        velocity: of earlier steps by parameter, taken over and changed; None: zero.
    """

    def __init__(self, sgd: SGD, start: Vectors, velocity: Vectors | None = None) -> None:
        self.sgd = sgd
        self.start = start
        zero = {name: np.zeros_like(values) for name, values in start.items()} if sgd.momentum else {}
        self.velocity: Vectors = zero if velocity is None else velocity
        self._scratch = np.empty(BLOCK, np.float32)

    def step(
        self,
        parameters: Vectors,
        gradients: Vectors,
        lr: float,
        *,
        proximal: float = 0.0,
        clip_norm: float | None = None,
    ) -> None:
        """Change the parameters in place; the gradients are used up.

        Raises NonFiniteError if the gradients to be clipped have no finite norm; nothing is changed then.
        """
        if proximal:
            for name, gradient in gradients.items():
                self._pull(gradient, parameters[name], self.start[name], proximal)
        if clip_norm is not None:
            _clip(gradients, clip_norm)
        for name, gradient in gradients.items():
            self._step(name, parameters[name], gradient, lr)

    def _pull(self, gradient: Vector, parameter: Vector, start: Vector, mu: float) -> None:
        """g += mu * (p - start)"""
        for g, p, p0 in _blocks(gradient, parameter, start):
            s = self._scratch[: g.size]
            np.subtract(p, p0, out=s)
            s *= mu
            g += s

    def _step(self, name: str, parameter: Vector, gradient: Vector, lr: float) -> None:
        momentum, decay = self.sgd.momentum, self.sgd.weight_decay
        velocity = self.velocity[name] if momentum else gradient
        for p, g, v in _blocks(parameter, gradient, velocity):
            s = self._scratch[: g.size]
            if decay:
                np.multiply(p, decay, out=s)
                g += s
            if momentum:
                v *= momentum
                v += g
            if self.sgd.nesterov:
                np.multiply(v, momentum, out=s)
                g += s
                v = g
            np.multiply(v, lr, out=s)
            p -= s


def accumulate(total: Vectors | None, gradients: Vectors, weight: float) -> Vectors:
    """``total + weight * gradients``, in place; the gradients are used up and become the first total."""
    for name, gradient in gradients.items():
        for start in range(0, gradient.size, BLOCK):
            g = gradient.reshape(-1)[start : start + BLOCK]
            g *= weight
            if total is not None:
                total[name].reshape(-1)[start : start + BLOCK] += g
    return gradients if total is None else total


def _clip(gradients: Vectors, limit: float) -> None:
    """Shorten all gradients together to the limit, as torch.nn.utils.clip_grad_norm_ does."""
    norm = math.sqrt(sum(float(np.dot(g, g)) for gradient in gradients.values() for (g,) in _blocks(gradient)))
    if not math.isfinite(norm):
        raise NonFiniteError("the gradients have no finite norm")
    scale = limit / (norm + 1e-6)
    if scale < 1:
        for gradient in gradients.values():
            gradient *= scale


def _blocks(*arrays: Vector) -> Iterator[tuple[Vector, ...]]:
    """Matching blocks of contiguous arrays of one size, as vectors."""
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, BLOCK):
        yield tuple(vector[start : start + BLOCK] for vector in flat)
