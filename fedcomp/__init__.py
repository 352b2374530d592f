"""fedcomp: compressed uploads for federated learning. This package is the core: numpy and the standard library only."""

from fedcomp.budget import Budget
from fedcomp.codec import Codec, from_config, parse_codec, register, registered, to_config
from fedcomp.codecs import (
    E8,
    ECSQ,
    EDEN,
    LRQ,
    QSGD,
    STC,
    Auto,
    BlockTopK,
    Codebook,
    CountSketch,
    Identity,
    LloydMax,
    LogQuantizer,
    LowRank,
    NoisySign,
    PowerSGD,
    RandomK,
    ResidualVQ,
    Sign,
    TensorTrain,
    TernGrad,
    Threshold,
    TopK,
    Trellis,
    Uniform,
    VectorQuantizer,
)
from fedcomp.compressor import CompressedUpdate, compress, decompress, generator
from fedcomp.errors import (
    BudgetError,
    BundleError,
    ConfigError,
    DataError,
    FedcompError,
    FrameError,
    LayoutError,
    NonFiniteError,
)
from fedcomp.feedback import (
    DGC,
    EF21,
    CAFe,
    ErrorFeedback,
    Feedback,
    FetchSGD,
    Memory,
    NoFeedback,
    as_feedback,
)
from fedcomp.layout import Layout, Tensor
from fedcomp.metrics import bits_per_parameter, cosine, nmse
from fedcomp.monitor import Monitor
from fedcomp.plan import Plan, Rule
from fedcomp.schedule import Schedule

__version__ = "0.1.0"

__all__ = [
    "DGC", "E8", "ECSQ", "EDEN", "EF21", "LRQ", "QSGD", "STC", "Auto", "BlockTopK", "Budget",
    "BudgetError", "BundleError", "CAFe", "Codebook", "Codec",
    "CompressedUpdate", "ConfigError", "CountSketch", "DataError", "ErrorFeedback", "FedcompError", "Feedback",
    "FetchSGD", "FrameError", "Identity", "Layout", "LayoutError", "LloydMax", "LogQuantizer", "LowRank", "Memory",
    "Monitor", "NoFeedback", "NoisySign", "NonFiniteError", "Plan", "PowerSGD", "RandomK", "ResidualVQ", "Rule",
    "Schedule", "Sign", "Tensor", "TensorTrain", "TernGrad", "Threshold", "TopK", "Trellis", "Uniform",
    "VectorQuantizer", "as_feedback", "bits_per_parameter", "compress", "cosine", "decompress", "from_config",
    "generator", "nmse", "parse_codec", "register", "registered", "to_config",
]  # fmt: skip
