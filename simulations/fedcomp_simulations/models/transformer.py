"""A small transformer for rows of symbols."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedcomp_simulations.models.embedding import embedding
from fedcomp_simulations.network import HEADS, Network

BLOCKS = 2


class Transformer(nn.Module):
    """Two causal blocks that normalize first, four heads (Vaswani et al. 2017, arXiv:1706.03762; Xiong et al. 2020,
    arXiv:2002.04745); for Shakespeare, 48 wide: 47,885 parameters.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        form, width = network.form, network.units
        self.everywhere = form.everywhere
        self.embedding = embedding(form.symbols, width)
        self.places = nn.Parameter(torch.empty(form.shape[0], width))
        self.blocks = nn.ModuleList(_Block(width) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, form.classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map rows of symbols, `(batch, positions)`, to scores, each from what stands up to its position.

        These are `(batch, positions, classes)`, or `(batch, classes)` from the last position if a row has one label.
        """
        states = self.embedding(x) + self.places  # (batch, positions, width)
        for block in self.blocks:
            states = block(states)
        if not self.everywhere:
            states = states[:, -1]
        scores: Tensor = self.output(self.norm(states))
        return scores


class _Block(nn.Module):
    """Self-attention, then two dense layers, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)  # queries, keys and values
        self.merge = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, width = x.shape
        heads = self.attention(self.norm1(x)).view(batch, positions, 3, HEADS, width // HEADS)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)  # (batch, heads, positions, width / heads)
        seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).reshape(batch, positions, width))
        more: Tensor = self.down(functional.relu(self.up(self.norm2(x))))
        return x + more
