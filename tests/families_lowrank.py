"""Low-rank codecs for the shared checklist."""

from fedcomp import Codec, Identity, Sign, TopK, Uniform
from fedcomp.codecs.lowrank import LowRank
from fedcomp.codecs.powersgd import PowerSGD
from fedcomp.codecs.tensortrain import TensorTrain

CODECS: list[Codec] = [
    LowRank(),
    LowRank(1, factors=Uniform(8)),
    LowRank(2, factors=Uniform(1)),
    LowRank(2, factors=Identity("float16")),
    LowRank(1, factors=TopK(0.5, values=Sign())),
    PowerSGD(),
    PowerSGD(1, factors=Uniform(4, block=8), seed=7, warm=False),
    TensorTrain(1),
    TensorTrain(3, factors=Uniform(8)),
]
