"""Lossless coding of small integers and of sets of positions; nothing here knows about tensors."""

from fedcomp.entropy.columns import columns_size, decode_columns, encode_columns
from fedcomp.entropy.contexts import decode_matrices, encode_matrices
from fedcomp.entropy.gaps import decode_positions, encode_positions
from fedcomp.entropy.symbols import SparseSymbols, decode_symbols, encode_symbols

__all__ = [
    "SparseSymbols",
    "columns_size",
    "decode_columns",
    "decode_matrices",
    "decode_positions",
    "decode_symbols",
    "encode_columns",
    "encode_matrices",
    "encode_positions",
    "encode_symbols",
]
