"""How the global model gets to the nodes: to each in a form that it is known to understand."""

from collections.abc import Collection, Iterable
from typing import Any

from flwr.app import Array, ArrayRecord, Message, RecordDict

from fedcomp import wire
from fedcomp.request import KEY, MODEL_STYPE, has_floats
from fedcomp_strategies.compact import MOST_IN_MESSAGES, MOST_IN_RECORD, with_package
from fedcomp_strategies.downlink import Downlink
from fedcomp_strategies.records import identity, views
from fedcomp_strategies.replies import Reply
from fedcomp_strategies.rounds import SentRound


class Delivery:
    """Packs the model in messages, and learns from replies which nodes can read that and what they hold.

    Args:
        downlink: makes the packages; None: models travel as the inner strategy sends them.
        mixed: whether some nodes may not have fedcomp: each gets plain models until it has answered with a frame.
        compact: whether packages may travel inside configurations, to nodes that look there. If not mixed, that is all
            but those that have failed and not shown since that they do.
    """

    def __init__(self, downlink: Downlink | None, *, mixed: bool, compact: bool) -> None:
        self.downlink = downlink
        # Brings the moving average, of which nodes keep nothing.
        self._whole = None if downlink is None else Downlink(None)
        self._mixed = mixed
        self._compact = compact
        self.restart()

    def restart(self) -> None:
        """Another training begins: forget the nodes and what they hold."""
        self._aware: set[int] = set()  # nodes that read packages
        self._readers: set[int] = set()  # those of them that look for these in the configuration
        self._doubted: set[int] = set()  # those that may not
        self._keepers: set[int] = set()  # nodes that keep the model
        for downlink in (self.downlink, self._whole):
            if downlink is not None:
                downlink.restart()

    def pack(
        self,
        messages: list[Message],
        models: Collection[Any],
        sent: SentRound,
        server_round: int,
        *,
        predictor: bytes | None = None,
        whole: bool = False,
    ) -> None:
        """Replace the global model in the messages by packages, for nodes that can read them.

        Args:
            messages: of a round; those to other nodes are left as they are.
            models: which records are models, by identity.
            sent: told which nodes got packages, and what is in them.
            server_round: number of the round.
            predictor: a frame that travels beside the model.
            whole: send models that nodes are not to keep.
        """
        downlink = self._whole if whole else self.downlink
        if downlink is None:
            return
        records: dict[bytes, ArrayRecord] = {}  # messages share theirs, and should go on doing so
        published, room = None, MOST_IN_MESSAGES
        for message in messages:
            node, held = message.metadata.dst_node_id, message.content.array_records
            if (self._mixed and node not in self._aware) or len(held) != 1:
                continue
            ((key, record),) = held.items()
            known = identity(record)
            if published is None and has_floats(record) and known in models:
                downlink.publish(views(record), server_round)
                published = known
            if known != published:  # strategies with several models at once
                continue
            data = downlink.package(node, predictor)
            if self._reads_compact(node) and len(data) <= min(MOST_IN_RECORD, room):
                room -= len(data)
                message.content = with_package(message.content, key, data)
            else:
                packed = Array(dtype="uint8", shape=(len(data),), stype=MODEL_STYPE, data=data)
                record = records.setdefault(data, ArrayRecord({KEY: packed}))
                message.content = RecordDict({**message.content, key: record})
            if not whole:
                sent.packed.add(node)
        if published is not None and downlink.plan is not None:
            sent.told = dict(downlink.told)

    def _reads_compact(self, node: int) -> bool:
        return self._compact and (node in self._readers or not (self._mixed or node in self._doubted))

    def confirm(self, replies: Iterable[Reply], sent: SentRound) -> None:
        """Remember which nodes understand what, and which of them hold the model of this round."""
        for reply in replies:
            if reply.notes is not None and reply.version == wire.VERSION:
                self._aware.add(reply.node)  # older ones could not read the frames in packages
                if reply.compact:
                    self._readers.add(reply.node)
            elif sent.sent and reply.cause in ("error", "stale"):  # perhaps it cannot read packages any more
                self._aware.discard(reply.node)
                self._readers.discard(reply.node)
                self._doubted.add(reply.node)
            if self.downlink is not None and reply.node in sent.packed:
                self._confirm_model(reply, self.downlink)

    def _confirm_model(self, reply: Reply, downlink: Downlink) -> None:
        if reply.notes is not None and not reply.notes.unkept:
            self._keepers.add(reply.node)
        elif reply.notes is not None or reply.cause == "stale":
            self._keepers.discard(reply.node)
        if reply.node not in self._keepers:  # other replies do not say whether the model was kept
            downlink.forget(reply.node)
        elif not reply.cause:
            downlink.confirm(reply.node)
