"""A network for series of several channels."""

from torch import Tensor, nn
from torch.nn import functional

from fedcomp_simulations.models.norm import normalization
from fedcomp_simulations.network import Network


class Cnn1d(nn.Module):
    """Three convolutions over time, their mean over time and two dense layers; for the IMU 26,879 parameters."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(network.form.shape[0], 24, 7, stride=2)
        self.norm1 = normalization(network.norm, 24, nn.BatchNorm1d)
        self.conv2 = nn.Conv1d(24, 48, 5, stride=2)
        self.norm2 = normalization(network.norm, 48, nn.BatchNorm1d)
        self.conv3 = nn.Conv1d(48, 64, 5)
        self.norm3 = normalization(network.norm, 64, nn.BatchNorm1d)
        self.hidden = nn.Linear(64, network.units)
        self.output = nn.Linear(network.units, network.form.classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map series, `(batch, channels, steps)`, to class scores, `(batch, classes)`."""
        x = functional.relu(self.norm1(self.conv1(x)))  # (batch, 24, 47) from 100 steps
        x = functional.relu(self.norm2(self.conv2(x)))  # (batch, 48, 22)
        x = functional.relu(self.norm3(self.conv3(x))).mean(dim=2)  # (batch, 64)
        scores: Tensor = self.output(functional.relu(self.hidden(x)))
        return scores
