"""A bundle of the digits network, its evaluation graph written by hand, and weights for it that torch has trained."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch.nn import functional

from fedcomp_clients.bundle import EVAL, INITIAL, TRAIN, Bundle, read_bundle, write_manifest
from fedcomp_clients.manifest import SGD, Data, Manifest, Tensor
from fedcomp_simulations.datasets import load
from fedcomp_simulations.models import build, initial_arrays

Model = dict[str, NDArray[Any]]

_NODES: list[tuple[str, list[str], str, dict[str, Any]]] = [
    ("Reshape", ["x", "image"], "images", {}),
    ("Conv", ["images", "t/conv1.weight", "t/conv1.bias"], "a", {"pads": [2, 2, 2, 2]}),
    ("MaxPool", ["a"], "b", {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ("Relu", ["b"], "c", {}),
    ("Conv", ["c", "t/conv2.weight", "t/conv2.bias"], "d", {"pads": [2, 2, 2, 2]}),
    ("MaxPool", ["d"], "e", {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ("Relu", ["e"], "f", {}),
    ("Flatten", ["f"], "g", {}),
    ("Transpose", ["t/hidden.weight"], "turned", {"perm": [1, 0]}),  # as torch's exporter has it: to be merged away
    ("MatMul", ["g", "turned"], "h0", {}),
    ("Add", ["h0", "t/hidden.bias"], "h", {}),
    ("Relu", ["h"], "i", {}),
    ("Gemm", ["i", "t/output.weight", "t/output.bias"], "output", {"transB": 1}),
    ("SoftmaxCrossEntropyLoss", ["output", "y"], "loss", {}),
    ("ArgMax", ["output"], "guess", {"axis": 1, "keepdims": 0}),
    ("Equal", ["guess", "y"], "right", {}),
    ("Cast", ["right"], "ones", {"to": TensorProto.INT64}),
    ("ReduceSum", ["ones"], "correct", {"keepdims": 0}),
]


def write_digits_bundle(folder: Path) -> Bundle:
    """Write it; train.onnx is the evaluation graph again, as nobody here trains with it."""
    initial: Model = dict(initial_arrays("cnn", 0))
    tensors = tuple(Tensor(name, value.shape, "float32", "parameter") for name, value in initial.items())
    takes = [*(f"t/{tensor.name}" for tensor in tensors), "x", "y"]
    inputs = [helper.make_tensor_value_info(f"t/{t.name}", TensorProto.FLOAT, list(t.shape)) for t in tensors]
    inputs += [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 784])]
    inputs += [helper.make_tensor_value_info("y", TensorProto.INT64, ["batch"])]
    results = [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", 10])]
    results += [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])]
    results += [helper.make_tensor_value_info("correct", TensorProto.INT64, [])]
    nodes = [helper.make_node(kind, reads, [makes], **settings) for kind, reads, makes, settings in _NODES]
    image = helper.make_tensor("image", TensorProto.INT64, [4], [-1, 1, 28, 28])
    graph = helper.make_graph(nodes, "digits", inputs, results, [image])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    folder.mkdir()
    for name in (TRAIN, EVAL):
        onnx.save(model, folder / name)
    np.savez(folder / INITIAL, **initial)  # type: ignore[arg-type]
    of_graphs = {name: tuple(takes) for name in (TRAIN, EVAL)}
    x, y = Data((784,), "float32"), Data((), "int64")
    manifest = Manifest(tensors, x, y, "classification", 10, SGD(), False, 18, of_graphs, {}, {})
    write_manifest(folder, manifest)
    return read_bundle(folder)


def trained(steps: int = 300) -> Model:
    """Weights after some steps of torch on 4,000 digits."""
    digits, model = load("mnist"), build("cnn", initial_arrays("cnn", 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        rows = rng.choice(len(digits.train_x), 32)
        optimizer.zero_grad()
        x, y = torch.from_numpy(digits.train_x[rows]), torch.from_numpy(digits.train_y[rows])
        functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}
