"""Networks for features and for images."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedcomp_simulations.models.norm import normalization
from fedcomp_simulations.network import Network


class Mlp(nn.Module):
    """One hidden layer with ReLU; for MNIST 784-64-10: 50,890 parameters."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.hidden = nn.Linear(network.form.features, network.units)
        self.output = nn.Linear(network.units, network.form.classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map samples, `(batch, ...)`, to class scores, `(batch, classes)`."""
        scores: Tensor = self.output(functional.relu(self.hidden(x.flatten(1))))
        return scores


class Cnn(nn.Module):
    """Two 5x5 convolutions with pooling and two dense layers; for MNIST 54,314 parameters."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        if network.form.image is None:
            raise ValueError(f"expected images, got {network.form}")  # a Network never lets this happen
        self.image = channels, height, width = network.form.image
        self.conv1 = nn.Conv2d(channels, 8, 5, padding=2)
        self.norm1 = normalization(network.norm, 8, nn.BatchNorm2d)
        self.conv2 = nn.Conv2d(8, 16, 5, padding=2)
        self.norm2 = normalization(network.norm, 16, nn.BatchNorm2d)
        self.hidden = nn.Linear(16 * (height // 4) * (width // 4), network.units)
        self.output = nn.Linear(network.units, network.form.classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images, `(batch, channels, height, width)` or rows of pixels, to class scores, `(batch, classes)`."""
        x = x.reshape(-1, *self.image)
        x = functional.relu(_halve(self.norm1(self.conv1(x))))  # (batch, 8, height / 2, width / 2)
        x = functional.relu(_halve(self.norm2(self.conv2(x))))  # (batch, 16, height / 4, width / 4)
        scores: Tensor = self.output(functional.relu(self.hidden(x.flatten(1))))
        return scores


def _halve(x: Tensor) -> Tensor:
    """Max-pool 2x2; without gradients by comparing slices, which gives the same values in a tenth of the time."""
    if torch.is_grad_enabled():
        return functional.max_pool2d(x, 2)
    height, width = (side // 2 * 2 for side in x.shape[-2:])  # an odd last row or column is left out
    rows = torch.maximum(x[..., :height:2, :width], x[..., 1::2, :width])
    return torch.maximum(rows[..., ::2], rows[..., 1::2])
