"""A vector for each symbol."""

import torch
from torch import nn


def embedding(symbols: int, width: int) -> nn.Embedding:
    """Make a layer that maps symbols to vectors."""
    nothing = torch.empty(symbols, width)  # to draw on the meta device would load torch's compiler: a second
    made: nn.Embedding = nn.Embedding.from_pretrained(nothing, freeze=False)  # type: ignore[no-untyped-call]
    return made
