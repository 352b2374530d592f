"""A small transformer for rows of symbols."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedcomp_simulations.models.embedding import embedding
from fedcomp_simulations.network import HEADS, Network

BLOCKS = 2
SLOWEST = 100.0  # positions, over 2 pi, in which the slowest pair of a wide head turns around: about a row

Turn = tuple[Tensor, Tensor]  # cosines and sines, (positions, width of a head / 2)


class Transformer(nn.Module):
    """Two causal blocks that normalize first (Vaswani et al. 2017, arXiv:1706.03762; Xiong et al. 2020,
    arXiv:2002.04745), with four heads that turn by position (Su et al. 2021, arXiv:2104.09864).

    The normalization has no scales of its own (as in OLMo, Groeneveld et al. 2024, arXiv:2402.00838): they would travel
    in full with every upload, 2 kB of them. For Shakespeare, 48 wide: 45,005 parameters.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        form, width = network.form, network.units
        self.everywhere = form.everywhere
        self.embedding = embedding(form.symbols, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.output = nn.Linear(width, form.classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map rows of symbols, `(batch, positions)`, to scores, each from what stands up to its position.

        These are `(batch, positions, classes)`, or `(batch, classes)` from the last position if a row has one label.
        """
        states = self.embedding(x)  # (batch, positions, width)
        turn = _turn(x.shape[1], states.shape[2] // HEADS)
        for block in self.blocks:
            states = block(states, turn)
        if not self.everywhere:
            states = states[:, -1]
        scores: Tensor = self.output(self.norm(states))
        return scores


class _Block(nn.Module):
    """Self-attention, then two dense layers, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.Linear(width, 3 * width)  # queries, keys and values
        self.merge = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, turn: Turn) -> Tensor:
        batch, positions, width = x.shape
        heads = self.attention(self.norm1(x)).view(batch, positions, 3, HEADS, width // HEADS)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)  # (batch, heads, positions, width / heads)
        queries, keys = _turned(queries, turn), _turned(keys, turn)
        seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).reshape(batch, positions, width))
        more: Tensor = self.down(functional.relu(self.up(self.norm2(x))))
        return x + more


def _turn(positions: int, width: int) -> Turn:
    """The angle of each pair of a head at each position: position / SLOWEST^(pair / pairs)."""
    pairs = width // 2
    angles = torch.arange(positions)[:, None] * SLOWEST ** (-torch.arange(pairs) / pairs)
    return angles.cos(), angles.sin()


def _turned(heads: Tensor, turn: Turn) -> Tensor:
    """Turn pairs by their angles, so that the products of queries and keys hang on how far apart they stand."""
    cosines, sines = turn
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, first * sines + second * cosines), dim=-1)
