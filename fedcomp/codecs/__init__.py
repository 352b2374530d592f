"""The codecs, one idea a file. Importing this package registers them all."""

from fedcomp.codecs.auto import Auto
from fedcomp.codecs.blocktopk import BlockTopK
from fedcomp.codecs.e8 import E8
from fedcomp.codecs.ecsq import ECSQ
from fedcomp.codecs.eden import EDEN
from fedcomp.codecs.identity import Identity
from fedcomp.codecs.lloydmax import LloydMax
from fedcomp.codecs.logquant import LogQuantizer
from fedcomp.codecs.lowrank import LowRank
from fedcomp.codecs.lrq import LRQ
from fedcomp.codecs.noisysign import NoisySign
from fedcomp.codecs.powersgd import PowerSGD
from fedcomp.codecs.qsgd import QSGD
from fedcomp.codecs.randk import RandomK
from fedcomp.codecs.rvq import ResidualVQ
from fedcomp.codecs.sign import Sign
from fedcomp.codecs.sketch import CountSketch
from fedcomp.codecs.tensortrain import TensorTrain
from fedcomp.codecs.ternary import STC, TernGrad
from fedcomp.codecs.threshold import Threshold
from fedcomp.codecs.topk import TopK
from fedcomp.codecs.trellis import Trellis
from fedcomp.codecs.uniform import Uniform
from fedcomp.codecs.vq import Codebook, VectorQuantizer

__all__ = [
    "E8", "ECSQ", "EDEN", "LRQ", "QSGD", "STC", "Auto", "BlockTopK", "Codebook", "CountSketch", "Identity", "LloydMax",
    "LogQuantizer", "LowRank", "NoisySign", "PowerSGD", "RandomK", "ResidualVQ", "Sign", "TensorTrain", "TernGrad",
    "Threshold", "TopK", "Trellis", "Uniform", "VectorQuantizer",
]  # fmt: skip
