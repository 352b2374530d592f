"""The graphs of a bundle in onnxruntime, whose exceptions have no common base class."""

from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime
from numpy.typing import NDArray

from fedcomp.errors import BundleError, DataError
from fedcomp_clients.bundle import TRAIN, Bundle

Arrays = Mapping[str, NDArray[Any]]

_KINDS = {"float": "float32", "double": "float64"}  # onnxruntime's names where they are not numpy's

WRONG_OPTIMIZERS = ["MatmulTransposeFusion", "GemmTransposeFusion"]
"""Optimizers that change results: the first makes transpose(a) @ v wrong if v is a vector (seen with 1.32), the second
takes every transposition for one of two dimensions, see https://github.com/microsoft/onnxruntime/issues/32228."""


class Graph:
    """One graph of a bundle, ready to run.

    Args:
        name: "train.onnx" or "eval.onnx".
        threads: that an operator may use.
        seed: of the random numbers that the graph draws; None: unlike each time.
        optimize: let onnxruntime rewrite the graph, which is faster.

    Raises BundleError if onnxruntime cannot load it, or its inputs and outputs are not those of the manifest.
    """

    def __init__(
        self, bundle: Bundle, name: str, *, threads: int, seed: int | None = None, optimize: bool = True
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.enable_mem_pattern = False  # a quarter less memory, no slower
        options.log_severity_level = 4  # what goes wrong is raised
        if not optimize:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        if seed is not None:
            onnxruntime.set_seed(seed)  # random operators read it when the session is made, not later
        try:
            self._session = onnxruntime.InferenceSession(
                bundle.graph(name), options, providers=["CPUExecutionProvider"], disabled_optimizers=WRONG_OPTIMIZERS
            )
        except BundleError:
            raise
        except Exception as error:
            raise BundleError(
                f"{name} cannot be loaded by onnxruntime {onnxruntime.__version__} ({_first_line(error)}); "
                "upgrade onnxruntime, or export the bundle again"
            ) from error
        self._name = name
        _check_inputs(self._session, bundle, name)
        self.inputs = tuple(value.name for value in self._session.get_inputs())
        self.outputs = tuple(value.name for value in self._session.get_outputs())
        wanted = {"loss", "correct"}
        if name == TRAIN:
            wanted |= {f"g/{tensor.name}" for tensor in bundle.manifest.named("parameter")}
        if missing := wanted - set(self.outputs):
            raise BundleError(f"{name}: outputs {sorted(missing)} are missing; export the bundle again")

    def run(self, outputs: Sequence[str], values: Arrays, x: NDArray[Any], y: NDArray[Any]) -> list[NDArray[Any]]:
        """Outputs of the graph as arrays of the caller's own. Raises DataError if an operator refuses the values."""
        given = {"x": x, "y": y}
        feeds = {name: given[name] if name in given else values[name[2:]] for name in self.inputs}
        try:
            return self._session.run(outputs, feeds)  # type: ignore[no-any-return]
        except Exception as error:
            raise DataError(
                f"{self._name} cannot compute a batch of {len(x)} samples ({_first_line(error)}); "
                "look for values in x or y that the model does not know"
            ) from error


def _check_inputs(session: onnxruntime.InferenceSession, bundle: Bundle, name: str) -> None:
    manifest = bundle.manifest
    expected: dict[str, tuple[str, tuple[int, ...]]] = {f"t/{t.name}": (t.dtype, t.shape) for t in manifest.tensors}
    expected |= {"x": (manifest.x.dtype, manifest.x.shape), "y": (manifest.y.dtype, manifest.y.shape)}
    found = {value.name: value for value in session.get_inputs()}
    if found.keys() != set(manifest.inputs[name]):
        raise BundleError(
            f"{name}: takes {sorted(found)}, but the manifest says {sorted(manifest.inputs[name])}; export it again"
        )
    for key, value in found.items():
        dtype, shape = expected[key]
        kind = value.type.removeprefix("tensor(").removesuffix(")")
        sides = tuple(value.shape) if key.startswith("t/") else tuple(value.shape[1:])
        kind = _KINDS.get(kind, kind)
        if (kind, sides) != (dtype, shape):
            raise BundleError(
                f"{name}: {key} is {kind} {sides}, but the manifest says {dtype} {shape}; export it again"
            )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
