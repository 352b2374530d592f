"""Tiny training bundles made by hand, so that the tests of the device side need no torch.

A perceptron with one hidden layer for classification, and a linear model for regression.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from fedcomp_clients.bundle import EVAL, INITIAL, SGD, TRAIN, Check, Data, Manifest, Tensor, write_manifest

Arrays = dict[str, NDArray[Any]]

INPUTS, HIDDEN, CLASSES = 6, 5, 3
KINDS = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}

FORWARD = """
scaled = Mul x t/scale
w1t = Transpose t/w1
a = MatMul scaled w1t
b = Add a t/b1
h0 = Relu b
w2t = Transpose t/w2
c = MatMul {hidden} w2t
output = Add c t/b2
logp = LogSoftmax output
hot = OneHot y classes values
picked = Mul logp hot
total = ReduceSum picked
shape = Shape y
n64 = Gather shape zero
n = Cast:1 n64
mean = Div total n
loss = Neg mean
best = ArgMax output
right = Equal best y
right64 = Cast:7 right
correct = ReduceSum right64
"""
DROPOUT = """
draw = RandomUniformLike h0
kept = Greater draw half
mask = Cast:1 kept
h = Mul h0 mask
"""
BACKWARD = """
p = Softmax output
wrong = Sub p hot
d = Div wrong n
dt = Transpose d
g/w2 = MatMul dt {hidden}
g/b2 = ReduceSum:0 d
back = MatMul d t/w2
active = Greater {hidden} nought
active1 = Cast:1 active
dh = Mul back active1
dht = Transpose dh
g/w1 = MatMul dht scaled
g/b1 = ReduceSum:0 dh
b/steps = Add t/steps one64
batchmean = ReduceMean:0 x
olda = Mul t/mean nine
newa = Mul batchmean tenth
b/mean = Add olda newa
"""
VARIANCE = """
centred = Sub x batchmean
squares = Mul centred centred
sumsq = ReduceSum:0 squares
less = Sub n one
batchvar = Div sumsq less
newa = Mul batchvar tenth
"""
LINEAR = """
a = MatMul x t/w
output = Add a t/b
e = Sub output y
square = Mul e e
loss = ReduceMean square
correct = Identity zero64
"""
LINEAR_BACKWARD = """
shape = Shape y
n64 = Gather shape zero
n = Cast:1 n64
e2 = Mul e two
d = Div e2 n
xt = Transpose x
g/w = MatMul xt d
g/b = ReduceSum d
"""
CONSTANTS: Arrays = {
    "values": np.array([0, 1], np.float32),
    "axis": np.array([0], np.int64),
    "zero": np.array(0, np.int64),
    "zero64": np.array(0, np.int64),
    "one64": np.array(1, np.int64),
    "half": np.array(0.5, np.float32),
    "one": np.array(1, np.float32),
    "nought": np.array(0, np.float32),
    "nine": np.array(0.9, np.float32),
    "tenth": np.array(0.1, np.float32),
    "two": np.array(2, np.float32),
}


def mlp(
    folder: Path,
    *,
    optimizer: SGD | None = None,
    dropout: bool = False,
    variance: bool = False,
    sizes: tuple[int, int, int] = (INPUTS, HIDDEN, CLASSES),
) -> Path:
    """Make the bundle of a perceptron with a frozen scale, a counter of steps and a running mean of the inputs.

    Args:
        sizes: inputs, hidden units, classes.
        variance: keep the variance of each batch instead of the mean, as batch norm does: 0/0 for one sample.
    """
    random = np.random.default_rng(0)
    inputs, units, classes = sizes
    values: Arrays = {
        "w1": random.standard_normal((units, inputs)).astype(np.float32),
        "b1": np.zeros(units, np.float32),
        "w2": random.standard_normal((classes, units)).astype(np.float32),
        "b2": np.zeros(classes, np.float32),
        "scale": np.array(0.5, np.float32),
        "steps": np.array(0, np.int64),
        "mean": np.zeros(inputs, np.float32),
    }
    roles = dict.fromkeys(("w1", "b1", "w2", "b2"), "parameter") | {"scale": "frozen"}
    tensors = tuple(Tensor(n, v.shape, v.dtype.name, roles.get(n, "buffer")) for n, v in values.items())
    hidden = "h" if dropout else "h0"
    head, _, tail = FORWARD.partition("w2t =")
    train = head + (DROPOUT if dropout else "") + "w2t =" + tail + BACKWARD
    if variance:
        train = train.replace("newa = Mul batchmean tenth\n", VARIANCE.lstrip())
    x, y = Data((inputs,), "float32"), Data((), "int64")
    return _write(
        folder, tensors, values, (train.format(hidden=hidden), FORWARD.format(hidden="h0")), x, y,
        classes=classes, optimizer=optimizer or SGD(0.9), random=dropout,
    )  # fmt: skip


def linear(folder: Path, *, optimizer: SGD | None = None) -> Path:
    """Make the bundle of linear regression of one value."""
    values: Arrays = {"w": np.zeros(INPUTS, np.float32), "b": np.zeros((), np.float32)}
    tensors = tuple(Tensor(n, v.shape, "float32", "parameter") for n, v in values.items())
    x, y = Data((INPUTS,), "float32"), Data((), "float32")
    return _write(
        folder, tensors, values, (LINEAR + LINEAR_BACKWARD, LINEAR), x, y, task="regression",
        classes=None, optimizer=optimizer or SGD(),
    )  # fmt: skip


def _write(
    folder: Path,
    tensors: tuple[Tensor, ...],
    values: Arrays,
    graphs: tuple[str, str],
    x: Data,
    y: Data,
    *,
    classes: int | None,
    optimizer: SGD,
    task: str = "classification",
    random: bool = False,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / INITIAL, **values)  # type: ignore[arg-type]
    inputs = {
        name: _graph(folder / name, text, tensors, x, y) for name, text in zip((TRAIN, EVAL), graphs, strict=True)
    }
    check = None if random else Check((4, 7), 6e-8)
    versions = {"fedcomp": "0.1.0", "onnx": onnx.__version__}
    write_manifest(folder, Manifest(tensors, x, y, task, classes, optimizer, random, 18, inputs, {}, versions, check))
    return folder


def _graph(path: Path, text: str, tensors: tuple[Tensor, ...], x: Data, y: Data) -> tuple[str, ...]:
    nodes = [_node(line) for line in text.split("\n") if line]
    used = {name for node in nodes for name in node.input}
    kinds: dict[str, tuple[str, tuple[int | str, ...]]] = {f"t/{t.name}": (t.dtype, t.shape) for t in tensors}
    kinds |= {"x": (x.dtype, ("n", *x.shape)), "y": (y.dtype, ("n", *y.shape))}
    inputs = [helper.make_tensor_value_info(n, KINDS[d], shape) for n, (d, shape) in kinds.items() if n in used]
    made = {name for node in nodes for name in node.output}
    outputs = [helper.make_tensor_value_info("loss", KINDS["float32"], ())]
    outputs += [helper.make_tensor_value_info("correct", KINDS["int64"], ())]
    if path.name == EVAL:
        outputs.append(helper.make_empty_tensor_value_info("output"))
    for t in tensors:
        if (name := f"{'b' if t.role == 'buffer' else 'g'}/{t.name}") in made:
            outputs.append(helper.make_tensor_value_info(name, KINDS[t.dtype], t.shape))
    classes = {"classes": np.array(kinds["t/b2"][1][0], np.int64)} if "t/b2" in kinds else {}
    constants = [numpy_helper.from_array(v, n) for n, v in (CONSTANTS | classes).items() if n in used]
    graph = helper.make_graph(nodes, "step", inputs, outputs, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    return tuple(value.name for value in inputs)


def _node(line: str) -> onnx.NodeProto:
    """From ``output = Op:attribute input input``."""
    output, _, rest = line.partition(" = ")
    op, *inputs = rest.split()
    op, _, argument = op.partition(":")
    more: dict[str, Any] = {}
    if op == "Cast":
        more["to"] = int(argument)
    elif op in ("ReduceSum", "ReduceMean"):
        more["keepdims"] = 0
        inputs += ["axis"] if argument else []
    elif op == "ArgMax":
        more = {"axis": -1, "keepdims": 0}
    return helper.make_node(op, inputs, [output], **more)
