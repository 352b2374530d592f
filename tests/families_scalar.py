"""The scalar families in the settings that take different paths, for the shared laws."""

import numpy as np

from fedcomp import Codebook, Codec
from fedcomp.codecs.ecsq import ECSQ
from fedcomp.codecs.lloydmax import LloydMax
from fedcomp.codecs.logquant import LogQuantizer
from fedcomp.codecs.noisysign import NoisySign
from fedcomp.codecs.qsgd import QSGD
from fedcomp.codecs.ternary import STC, TernGrad
from fedcomp.codecs.trellis import Trellis

CODECS: list[Codec] = [
    QSGD(),
    QSGD(levels=1, bucket=0),
    QSGD(levels=127, bucket=7),
    TernGrad(),
    TernGrad(clip=0),
    STC(),
    STC(0.5),
    NoisySign(),
    NoisySign(0.01),
    NoisySign(noise="uniform"),
    NoisySign(0.5, noise="uniform"),
    LogQuantizer(),
    LogQuantizer(bits=2, octaves=1, block=16),
    LogQuantizer(bits=8, octaves=60),
    LogQuantizer(rounding="log"),
    LogQuantizer(bits=3, rounding="stochastic"),
    LogQuantizer(rounding="stochastic", block=16),
    LloydMax(),
    LloydMax(bits=1),
    LloydMax(bits=8),
    LloydMax(bits=3, block=16),
    LloydMax(bits=2, codebook=Codebook.of(np.array([[1.5], [-0.5], [-3]], np.float32))),
    ECSQ(step=1),
    ECSQ(step=1e-6),
    ECSQ(step=0.3, rho=0.5),
    ECSQ(bits=2, rho=0.33),
    ECSQ(bits=0.1),
    ECSQ(step=0.5, rounding="stochastic"),
    ECSQ(step=1e-6, rounding="stochastic"),
    ECSQ(bits=1, rounding="stochastic"),
    Trellis(step=1),
    Trellis(step=1e-6),
    Trellis(bits=2),
]
