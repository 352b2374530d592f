"""The codecs that the shared checklist runs over: each registered one, in the settings that take other paths."""

import families_lowrank
import families_scalar
import families_sparse
import numpy as np

from fedcomp import EDEN, Auto, Codebook, Codec, Identity, Sign, TopK, Uniform, VectorQuantizer
from fedcomp.codecs.lrq import LRQ

_VECTORS = np.random.default_rng(5).standard_normal((15, 4), np.float32)

CODECS: list[Codec] = [
    *families_lowrank.CODECS,
    *families_scalar.CODECS,
    *families_sparse.CODECS,
    LRQ(bits=0.5),
    LRQ(step=0.3, rank=3),
    LRQ(step=1e-3, rank=1, rho=0.5),
    LRQ(bits=12, rank=64, rho=0.2),
    Auto("20 kB"),
    Auto("200 B"),
    Auto("1 kB", step=0.2),
    Auto("4 kB", unbiased=True),
    Auto("600 B", unbiased=True),
    Auto("400 B", unbiased=True, step=3.0),
    EDEN(0.4, compact=True),
    Identity(),
    Identity("float16"),
    Uniform(8),
    Uniform(8, block=64),
    Uniform(5, fast=True),
    Uniform(4, block=7),
    Uniform(1),
    Uniform(1, block=16),
    Uniform(2, rounding="stochastic"),
    Uniform(1, rounding="stochastic"),
    Uniform(3, block=16, rounding="stochastic"),
    Uniform(8, affine=True),
    Uniform(8, block=64, affine=True),
    Uniform(1, block=1, affine=True),
    Uniform(4, block=32, affine=True, rounding="stochastic"),
    Sign(),
    Sign("plus"),
    TopK(0.1),
    TopK(k=3, values=Uniform(8)),
    TopK(0.3, values=Uniform(4, block=8), scope="tensor"),
    TopK(0.5, values=Sign()),
    VectorQuantizer(dim=1, size=2),
    VectorQuantizer(dim=4, size=8),
    VectorQuantizer(dim=2, size=16, block=16),
    VectorQuantizer(dim=4, size=16, codebook=Codebook.of(_VECTORS)),
]

IDS = [f"{index}-{str(codec)[:60]}" for index, codec in enumerate(CODECS)]
