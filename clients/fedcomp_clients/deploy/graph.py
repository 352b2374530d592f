"""The evaluation graph of a bundle becomes a plain model: trained values inside, x in, output out."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from fedcomp.errors import BundleError
from fedcomp_clients.bundle import EVAL, Bundle
from fedcomp_clients.parameters import as_tensors

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

Parameters = Mapping[str, NDArray[Any]] | Sequence[NDArray[Any]]
"""Values by tensor name, or in the manifest's order."""

X, Y, OUTPUT = "x", "y", "output"
_SEVERE = 3


def inference_model(bundle: Bundle, parameters: Parameters) -> "ModelProto":
    """The bundle's evaluation graph with these values, as a graph from `x` to `output` that onnxruntime has simplified.

    Raises LayoutError if the values do not fit the model, NonFiniteError if one is NaN or infinite, BundleError if the
    graph needs anything but values and x.
    """
    import onnx

    values = fitting(bundle, parameters)
    model = onnx.load_from_string(bundle.graph(EVAL))
    graph = model.graph
    _count_samples_in_x(graph)
    needed = _needed(graph, OUTPUT)
    _keep(graph.node, [node for node in graph.node if needed & set(node.output)])
    _keep(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in needed])
    _keep(graph.output, [output for output in graph.output if output.name == OUTPUT])
    graph.initializer.extend(
        onnx.numpy_helper.from_array(value, f"t/{name}") for name, value in values.items() if f"t/{name}" in needed
    )
    open_inputs = sorted(needed & {each.name for each in graph.input} - {f"t/{name}" for name in values} - {X})
    if open_inputs or X not in needed:
        raise BundleError(f"{EVAL}: expected an output that depends on x and the tensors, got {open_inputs or 'no x'}")
    _keep(graph.input, [each for each in graph.input if each.name == X])
    _keep(graph.value_info, [])
    return _simplified(model)


def fitting(bundle: Bundle, parameters: Parameters) -> dict[str, NDArray[Any]]:
    """Values of all tensors in the dtypes of the model; frozen ones that are not given by name are the bundle's own."""
    if isinstance(parameters, Mapping):
        parameters = {each.name: bundle.initial[each.name] for each in bundle.manifest.named("frozen")} | dict(
            parameters
        )
    return as_tensors(bundle.manifest, parameters)


def _count_samples_in_x(graph: "GraphProto") -> None:
    """Have the size of the batch, which the exporter may read off y, read off x."""
    for node in graph.node:
        parts = {attribute.name: attribute.i for attribute in node.attribute}
        if node.op_type == "Shape" and list(node.input) == [Y] and (parts.get("start", 0), parts.get("end")) == (0, 1):
            node.input[0] = X


def _needed(graph: "GraphProto", output: str) -> set[str]:
    """Names of all values that the output depends on, and its own."""
    makers = {name: node for node in graph.node for name in node.output}
    needed, open_names = set[str](), [output]
    while open_names:
        name = open_names.pop()
        if name in needed:
            continue
        needed.add(name)
        if name in makers:
            open_names += filter(None, _reads(makers[name]))
    return needed


def _reads(node: "NodeProto") -> Iterator[str]:
    """What a node reads, and the nodes inside it."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            yield from (output.name for output in graph.output)
            for inner in graph.node:
                yield from _reads(inner)


def _keep(field: Any, entries: list[Any]) -> None:
    """Replace what a repeated field holds; the entries may be its own."""
    copies = [type(entry).FromString(entry.SerializeToString()) for entry in entries]
    del field[:]
    field.extend(copies)


def _simplified(model: "ModelProto") -> "ModelProto":
    """The same model after what onnxruntime can compute and merge beforehand; only standard operators remain."""
    import onnx
    import onnxruntime

    from fedcomp_clients.onnx_session import WRONG_OPTIMIZERS

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _SEVERE
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with TemporaryDirectory(prefix="fedcomp-") as folder:
        path = Path(folder) / "model.onnx"
        options.optimized_model_filepath = str(path)
        onnxruntime.InferenceSession(
            model.SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=WRONG_OPTIMIZERS,
        )
        simplified = onnx.load(path)
    used = {node.domain for node in simplified.graph.node} | {""}
    _keep(simplified.opset_import, [entry for entry in simplified.opset_import if entry.domain in used])
    return onnx.shape_inference.infer_shapes(simplified)  # which quantisation wants to know
