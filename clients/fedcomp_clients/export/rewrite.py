"""Changes to an ONNX graph that make it faster, not different."""

import onnx_ir as ir


def multiply_transposed(graph: ir.Graph) -> None:
    """Let products of matrices read a transposed factor as it is, so that nothing is copied.

    onnxruntime has optimizers for this, but they are wrong in places, and a device does without them.
    """
    for node in list(graph):
        if node.op_type != "MatMul" or any(value is None or not _is_matrix(value) for value in node.inputs):
            continue
        sources = [_transposed(value) for value in node.inputs]
        if not any(sources):
            continue
        factors = [source or value for source, value in zip(sources, node.inputs, strict=True)]
        flags = {name: 1 for name, source in zip(("transA", "transB"), sources, strict=True) if source}
        product = ir.node("Gemm", factors, attributes=flags)
        product.outputs[0].shape, product.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
        ir.convenience.replace_nodes_and_values(graph, node, [node], [product], node.outputs, product.outputs)
    _drop_unread(graph)


def _is_matrix(value: ir.Value | None) -> bool:
    return value is not None and value.shape is not None and len(value.shape) == 2 and value.dtype == ir.DataType.FLOAT


def _transposed(value: ir.Value | None) -> ir.Value | None:
    """What a value is the transpose of, if it is."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Transpose":
        return None
    order = node.attributes.get("perm")
    return node.inputs[0] if order is None or list(order.as_ints()) == [1, 0] else None


def _drop_unread(graph: ir.Graph) -> None:
    for node in reversed(list(graph)):
        if node.op_type == "Transpose" and not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)
