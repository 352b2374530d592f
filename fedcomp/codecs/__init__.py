"""The codecs, one idea a file. Importing this package registers them all."""

from fedcomp.codecs.identity import Identity
from fedcomp.codecs.sign import Sign
from fedcomp.codecs.topk import TopK
from fedcomp.codecs.uniform import Uniform
from fedcomp.codecs.vq import Codebook, VectorQuantizer

__all__ = ["Codebook", "Identity", "Sign", "TopK", "Uniform", "VectorQuantizer"]
