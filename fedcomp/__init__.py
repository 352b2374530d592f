"""fedcomp: compressed uploads for federated learning. This package is the core: numpy and the standard library only."""

from fedcomp.codec import Codec, from_config, parse_codec, register, registered, to_config
from fedcomp.codecs import Codebook, Identity, Sign, TopK, Uniform, VectorQuantizer
from fedcomp.compressor import CompressedUpdate, compress, decompress, generator
from fedcomp.errors import ConfigError, FedcompError, FrameError, LayoutError, NonFiniteError
from fedcomp.feedback import ErrorFeedback
from fedcomp.layout import Layout, Tensor
from fedcomp.metrics import bits_per_parameter, cosine, nmse
from fedcomp.plan import Plan, Rule

__version__ = "0.1.0"

__all__ = [
    "Codebook",
    "Codec",
    "CompressedUpdate",
    "ConfigError",
    "ErrorFeedback",
    "FedcompError",
    "FrameError",
    "Identity",
    "Layout",
    "LayoutError",
    "NonFiniteError",
    "Plan",
    "Rule",
    "Sign",
    "Tensor",
    "TopK",
    "Uniform",
    "VectorQuantizer",
    "bits_per_parameter",
    "compress",
    "cosine",
    "decompress",
    "from_config",
    "generator",
    "nmse",
    "parse_codec",
    "register",
    "registered",
    "to_config",
]
