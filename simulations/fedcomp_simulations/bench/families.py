"""Models that devices train: one of each family, in a size for a table and a small one for tests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedcomp.errors import ConfigError

VOCABULARY = 77
Norm = Literal["none", "batch", "group"]


@dataclass(frozen=True)
class Family:
    """A model in training mode, the name of its loss, and samples for it."""

    name: str
    model: nn.Module
    loss: str
    x: Tensor
    y: Tensor

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(value.numel() for value in self.model.parameters() if value.requires_grad)


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norm, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, inputs, height, width)` to `(batch, outputs, height / stride, width / stride)`."""
        return functional.relu(self.path(x) + self.shortcut(x))


class Characters(nn.Module):
    """Predicts the next character with one recurrent layer."""

    def __init__(self, kind: type[nn.GRU | nn.LSTM], units: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.recurrent = kind(16, units, batch_first=True)
        self.output = nn.Linear(units, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Map characters `(batch, positions)` to scores `(batch, positions, vocabulary)`."""
        scores: Tensor = self.output(self.recurrent(self.embedding(x))[0])
        return scores


class Attention(nn.Module):
    """A transformer's block: causal attention, then two dense layers, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, positions, width)` to the same shape."""
        split = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.reshape(split).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.dense(self.norm2(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Predicts the next character with blocks of attention."""

    def __init__(self, positions: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Attention(width, heads) for _ in range(blocks)))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Map characters `(batch, positions)` to scores `(batch, positions, vocabulary)`."""
        places = self.places(torch.arange(x.shape[1], device=x.device))
        scores: Tensor = self.output(self.norm(self.blocks(self.embedding(x) + places)))
        return scores


def _cnn(side: int, width: int, hidden: int, norm: Norm = "none") -> nn.Module:
    def normed(channels: int) -> list[nn.Module]:
        if norm == "none":
            return []
        return [nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(4, channels)]

    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), *normed(width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), *normed(2 * width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2 * width * (side // 4) ** 2, hidden), nn.ReLU(), nn.Linear(hidden, 10),
    )  # fmt: skip


def _resnet(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10),
    )  # fmt: skip


def _mobilenet(width: int) -> nn.Module:
    layers = [nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU6()]
    for inputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
        layers += [
            nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
            nn.BatchNorm2d(inputs),
            nn.ReLU6(),
        ]
        layers += [nn.Conv2d(inputs, 2 * inputs, 1, bias=False), nn.BatchNorm2d(2 * inputs), nn.ReLU6()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


NAMES = (
    "mlp",
    "mlp regression",
    "cnn",
    "cnn batch norm",
    "cnn group norm",
    "resnet",
    "mobilenet",
    "gru",
    "lstm",
    "transformer",
)


def family(name: str, batch: int, *, small: bool = False, seed: int = 0) -> Family:
    """Make a model and random samples of a family. Raises ConfigError for a name that is not in NAMES."""
    if name not in NAMES:
        raise ConfigError(f"unknown family {name!r}; expected one of {', '.join(NAMES)}")
    torch.manual_seed(seed)
    model = _model(name, small)
    if name in ("gru", "lstm", "transformer"):
        x, y = torch.randint(VOCABULARY, (2, batch, _positions(small)))
        return Family(name, model, "cross_entropy", x, y)
    if name == "mlp regression":
        return Family(name, model, "smooth_l1", torch.randn(batch, 64), torch.randn(batch, 1))
    x = torch.randn(batch, 64) if name == "mlp" else torch.randn(batch, 1, _side(small), _side(small))
    return Family(name, model, "cross_entropy", x, torch.randint(10, (batch,)))


def _side(small: bool) -> int:
    return 8 if small else 28


def _positions(small: bool) -> int:
    return 8 if small else 32


def _model(name: str, small: bool) -> nn.Module:
    width, hidden, thin, units = (4, 16, 4, 8) if small else (32, 40, 16, 96)
    makers: dict[str, Callable[[], nn.Module]] = {
        "mlp": lambda: _mlp(32 if small else 120, 10),
        "mlp regression": lambda: _mlp(8, 1),
        "cnn": lambda: _cnn(_side(small), width, hidden),
        "cnn batch norm": lambda: _cnn(_side(small), width, hidden, "batch"),
        "cnn group norm": lambda: _cnn(_side(small), width, hidden, "group"),
        "resnet": lambda: _resnet(thin),
        "mobilenet": lambda: _mobilenet(thin),
        "gru": lambda: Characters(nn.GRU, units),
        "lstm": lambda: Characters(nn.LSTM, units),
        "transformer": lambda: Transformer(_positions(small), 4 * thin, 4, 1 if small else 2),
    }
    return makers[name]()


def _mlp(hidden: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
