"""Who a node is, for what is kept for it and what is drawn for it."""

from flwr.app import Context


def partition_of(context: Context) -> int | None:
    """The node's partition; None if its configuration has none."""
    partition = context.node_config.get("partition-id")
    return partition if isinstance(partition, int) and partition >= 0 else None


def node_of(context: Context) -> tuple[str, int]:
    """Name and number of this node: its partition where it has one, since node ids change when a SuperNode restarts."""
    partition = partition_of(context)
    return (f"node-{context.node_id}", context.node_id) if partition is None else (f"partition-{partition}", partition)
