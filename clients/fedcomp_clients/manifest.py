"""What ``manifest.json`` of a training bundle says, see `fedcomp_clients.bundle`."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from fedcomp.errors import BundleError

FORMAT = "fedcomp-bundle"
VERSION = 1
MANIFEST = "manifest.json"
TRAIN = "train.onnx"
EVAL = "eval.onnx"
INITIAL = "init.npz"
FILES = (TRAIN, EVAL, INITIAL)
ROLES = ("parameter", "frozen", "buffer")
TASKS = ("classification", "regression")
TENSOR_DTYPES = ("float32", "float64", "int64", "int32", "bool")
DATA_DTYPES = (*TENSOR_DTYPES, "uint8")

REMEDY = "copy or export the bundle again"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Tensor:
    """One tensor of the model.

    Attributes:
        role: "parameter" is trained, "frozen" is a parameter that is not, "buffer" is what the model itself keeps.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Data:
    """Shape of one sample, without the batch dimension, and dtype of inputs or targets."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent as in torch.optim.SGD; the learning rate is told when training."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True)
class Check:
    """How far one step was from torch's when the bundle was exported, and at which batch sizes."""

    batches: tuple[int, ...]
    largest_difference: float


@dataclass(frozen=True)
class File:
    """What a file of the bundle must be like."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """What is in a bundle.

    Attributes:
        tensors: parameters, then frozen ones, then buffers, each in the order of the model.
        task: "classification" (integer labels) or "regression".
        classes: number of labels; None if labels are not bounded, or there are none.
        random: whether train.onnx draws random numbers, as dropout does.
        inputs: names that each graph takes: those of tensors it does not use are not among them.
        files: by name; `write_manifest` fills them in.
        versions: of the software that made the bundle.
        check: None if the step could not be compared, because it is random.
    """

    tensors: tuple[Tensor, ...]
    x: Data
    y: Data
    task: str
    classes: int | None
    optimizer: SGD
    random: bool
    opset: int
    inputs: Mapping[str, tuple[str, ...]]
    files: Mapping[str, File]
    versions: Mapping[str, str]
    check: Check | None = None

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) < len(names):
            raise BundleError(f"{MANIFEST}: tensor names must differ, got {sorted(names)}")
        roles = [ROLES.index(tensor.role) for tensor in self.tensors]
        if roles != sorted(roles) or 0 not in roles:
            raise BundleError(f"{MANIFEST}: expected parameters, then frozen tensors, then buffers, got another order")
        known = {f"t/{name}" for name in names} | {"x", "y"}
        for graph in (TRAIN, EVAL):
            if unknown := set(self.inputs.get(graph, ())) - known:
                raise BundleError(f"{MANIFEST}: {graph} takes {sorted(unknown)}, which are no tensors of the model")

    def named(self, role: str) -> tuple[Tensor, ...]:
        """The tensors of a role, in order."""
        return tuple(tensor for tensor in self.tensors if tensor.role == role)

    def to_json(self) -> str:
        """The text of manifest.json, the same for equal manifests."""
        told = {"format": FORMAT, "version": VERSION, **asdict(self)}
        told["optimizer"] = {"name": "sgd", **told["optimizer"]}
        return json.dumps(told, indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """The manifest in a text. Raises BundleError if there is none, or one of another version."""
        try:
            told = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{MANIFEST} is no valid JSON ({error}); {REMEDY}") from None
        if not isinstance(told, dict) or told.get("format") != FORMAT:
            raise BundleError(f"{MANIFEST}: expected the format {FORMAT!r}; this is no training bundle")
        _check_version(told.get("version"))
        return _manifest(told)


def _check_version(version: object) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise BundleError(f"{MANIFEST}: expected a version number, got {version!r}; {REMEDY}")
    if version > VERSION:
        raise BundleError(
            f"{MANIFEST}: version {version} is newer than {VERSION}, the newest that this fedcomp reads; "
            "upgrade fedcomp on this device or export the bundle with the older one"
        )


def _manifest(told: Mapping[str, Any]) -> Manifest:
    tensors = [_tensor(entry) for entry in _get(told, "tensors", list)]
    optimizer, check = _get(told, "optimizer", dict), told.get("check")
    if optimizer.get("name") != "sgd":
        raise BundleError(
            f"{MANIFEST}: optimizer {optimizer.get('name')!r} is unknown, expected 'sgd'; upgrade fedcomp"
        )
    if told.get("task") not in TASKS:
        raise BundleError(f"{MANIFEST}: task {told.get('task')!r} is unknown, expected one of {', '.join(TASKS)}")
    classes = None if told.get("classes") is None else _get(told, "classes", int)
    if classes is not None and classes < 1:
        raise BundleError(f"{MANIFEST}: expected at least one class, got {classes}")
    return Manifest(
        tuple(tensors),
        _data(told, "x"),
        _data(told, "y"),
        told["task"],
        classes,
        _sgd(optimizer),
        _get(told, "random", bool),
        _get(told, "opset", int),
        {graph: tuple(_texts(_get(told, "inputs", dict), graph)) for graph in (TRAIN, EVAL)},
        {name: _file(name, entry) for name, entry in _get(told, "files", dict).items()},
        {name: str(version) for name, version in _get(told, "versions", dict).items()},
        None if check is None else _check(_of_kind(check, dict, "check")),
    )


def _tensor(entry: object) -> Tensor:
    told = _of_kind(entry, dict, "tensors")
    tensor = Tensor(_get(told, "name", str), _shape(told), _get(told, "dtype", str), _get(told, "role", str))
    if tensor.role not in ROLES:
        raise BundleError(f"{MANIFEST}: tensor {tensor.name!r} has the unknown role {tensor.role!r}; upgrade fedcomp")
    allowed = ("float32",) if tensor.role == "parameter" else TENSOR_DTYPES
    if tensor.dtype not in allowed:
        raise BundleError(f"{MANIFEST}: {tensor.role} {tensor.name!r} is {tensor.dtype}, expected {', '.join(allowed)}")
    return tensor


def _data(told: Mapping[str, Any], key: str) -> Data:
    entry = _get(told, key, dict)
    data = Data(_shape(entry), _get(entry, "dtype", str))
    if data.dtype not in DATA_DTYPES:
        raise BundleError(f"{MANIFEST}: {key} is {data.dtype}, expected one of {', '.join(DATA_DTYPES)}")
    return data


def _sgd(told: Mapping[str, Any]) -> SGD:
    sgd = SGD(_number(told, "momentum"), _number(told, "weight_decay"), _get(told, "nesterov", bool))
    if not (0 <= sgd.momentum < 1 and 0 <= sgd.weight_decay < math.inf):
        raise BundleError(f"{MANIFEST}: optimizer out of range: {sgd}")
    if sgd.nesterov and not sgd.momentum:
        raise BundleError(f"{MANIFEST}: optimizer: nesterov needs a momentum above 0")
    return sgd


def _check(told: Mapping[str, Any]) -> Check:
    return Check(
        tuple(_of_kind(n, int, "check") for n in _get(told, "batches", list)), _number(told, "largest_difference")
    )


def _file(name: str, entry: object) -> File:
    if name not in FILES:  # such as "../elsewhere"
        raise BundleError(f"{MANIFEST}: file {name!r} does not belong into a bundle, expected {', '.join(FILES)}")
    told = _of_kind(entry, dict, f"files, {name}")
    return File(_get(told, "sha256", str), _get(told, "bytes", int))


def _shape(told: Mapping[str, Any]) -> tuple[int, ...]:
    shape = tuple(_of_kind(side, int, "shape") for side in _get(told, "shape", list))
    if any(side < 0 for side in shape) or len(shape) > 32:
        raise BundleError(f"{MANIFEST}: {shape} is no shape; {REMEDY}")
    return shape


def _texts(told: Mapping[str, Any], key: str) -> list[str]:
    return [_of_kind(text, str, key) for text in _get(told, key, list)]


def _number(told: Mapping[str, Any], key: str) -> float:
    value = told.get(key)
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else _of_kind(value, float, key)


def _get(told: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    if key not in told:
        raise BundleError(f"{MANIFEST}: {key!r} is missing; {REMEDY}")
    return _of_kind(told[key], kind, key)


def _of_kind(value: object, kind: type[_T], where: str) -> _T:
    """The value, if it is of this kind; truth values are no numbers."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise BundleError(f"{MANIFEST}: {where}: expected {kind.__name__}, got {str(value)[:40]!r}; {REMEDY}")
    return value
