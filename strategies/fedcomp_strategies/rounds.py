"""What one round's messages have said, and what came of the replies."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, Metadata, MetricRecord

from fedcomp.layout import Vector
from fedcomp_strategies.records import Model, identity, views
from fedcomp_strategies.replies import Reply
from fedcomp_strategies.traffic import objects_in, transport


@dataclass
class SentRound:
    """What the messages of a round have said, kept until the replies are in.

    Attributes:
        arrays: the global model.
        asked: messages by node.
        sent: the model that the inner strategy sent to each node that was asked for a frame.
        packed: nodes that got the model as a package.
        told: the model as those nodes hold it, where the downlink loses something.
        objects: that the transport makes of each node's messages.
    """

    arrays: ArrayRecord
    asked: Counter[int] = field(default_factory=Counter)
    sent: dict[int, ArrayRecord] = field(default_factory=dict)
    packed: set[int] = field(default_factory=set)
    told: Model = field(default_factory=dict)
    objects: Counter[int] = field(default_factory=Counter)
    _labels: list[Metadata] = field(default_factory=list)
    _bases: dict[Any, Model] = field(default_factory=dict)

    def note(self, messages: Iterable[Message]) -> None:
        """Remember the messages' labels, and what the transport makes of them."""
        for message in messages:
            self._labels.append(message.metadata)
            self.objects[message.metadata.dst_node_id] += objects_in(message.content)

    @property
    def addressees(self) -> dict[str, int]:
        """Nodes by the id of the message to them, which it is given when it is sent."""
        return {label.message_id: label.dst_node_id for label in self._labels if label.message_id}

    def wire_up(self, replies: Iterable[Reply]) -> int:
        """Estimated bytes of the messages and the replies on the nodes' uplinks."""
        replied = {reply.node: reply for reply in replies if reply.arrived}
        return sum(
            transport(objects, replied[node].objects, replied[node].payload)
            if node in replied
            else transport(objects, 0, 0)
            for node, objects in self.objects.items()
        )

    def base(self, node: int) -> Model:
        """The arrays that a node was meant to be sent, unpacked once however many nodes got them."""
        sent = self.sent[node]
        if identity(sent) not in self._bases:
            self._bases[identity(sent)] = views(sent)
        return self._bases[identity(sent)]

    def corrected(self, node: int, model: Model, names: Iterable[str]) -> Model:
        """A client's model, with these tensors as if the client had been told the global model without loss."""
        if node not in self.packed or not self.told:
            return model
        base = self.base(node)
        moved = {
            n: model[n] + (base[n] - self.told[n]) for n in names if model[n].dtype.kind == base[n].dtype.kind == "f"
        }
        return model | {name: np.asarray(values, model[name].dtype) for name, values in moved.items()}


@dataclass(frozen=True)
class Outcome:
    """What came of the replies of a round.

    Attributes:
        replies: as they came out: those that were refused along the way are marked.
        arrays, metrics: of the inner strategy.
        update: the mean update of the coded tensors, if feedback wants to see it and it was computed.
        counted: nodes whose replies have had an influence on the model.
        levels: by node, the steps at which frames were coded, where codecs have some.
    """

    replies: list[Reply]
    arrays: ArrayRecord | None = None
    metrics: MetricRecord | None = None
    update: Mapping[str, Vector] | None = None
    counted: Collection[int] = ()
    levels: Mapping[int, float] = field(default_factory=dict)
