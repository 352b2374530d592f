"""Sparse, rotated, sketched, lattice and residual codecs, in the settings that take other paths."""

import numpy as np

from fedcomp import Codebook, Codec, Sign, Uniform
from fedcomp.codecs.blocktopk import BlockTopK
from fedcomp.codecs.e8 import E8
from fedcomp.codecs.eden import EDEN
from fedcomp.codecs.randk import RandomK
from fedcomp.codecs.rvq import ResidualVQ
from fedcomp.codecs.sketch import CountSketch
from fedcomp.codecs.threshold import Threshold

_VECTORS = np.random.default_rng(5).standard_normal((14, 4)).astype(np.float32)

CODECS: list[Codec] = [
    RandomK(0.1),
    RandomK(k=80, values=Uniform(4, rounding="stochastic")),
    RandomK(0.4, values=Sign(), scaled=False),
    BlockTopK(0.1),
    BlockTopK(0.3, block=5, values=Uniform(4)),
    Threshold(0.5),
    Threshold(2.0, values=Uniform(8)),
    EDEN(1),
    EDEN(4),
    EDEN(2.5, rounds=2),
    EDEN(0.3),
    EDEN(1, scale="mse"),
    EDEN(8, scale="mse"),
    EDEN(0.1, scale="mse", rounds=2),
    CountSketch(rows=3, ratio=2.0),
    CountSketch(rows=4, columns=30, estimate="mean", seed=0),
    CountSketch(rows=1, columns=50, keep=0.1, dtype="float16"),
    E8(1.0),
    E8(6.0),
    E8(step=2.5),
    ResidualVQ(2, dim=4, size=8),
    ResidualVQ(3, dim=2, size=4, block=16),
    ResidualVQ(2, dim=4, size=8, codebook=Codebook.of(_VECTORS)),
]
