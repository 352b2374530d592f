"""What a training moved, round by round, and what is said about it in the log."""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from flwr.app import Message, MetricRecord

from fedcomp.wire import Notes
from fedcomp_strategies.replies import UNASKED, Reply
from fedcomp_strategies.rounds import SentRound
from fedcomp_strategies.traffic import RoundTraffic, payload

log = logging.getLogger("fedcomp")
flower_log = logging.getLogger("flwr")

DROPPED = "fedcomp-dropped-"
"""Prefix of the metrics that count dropped replies by cause."""


class Accounts:
    """Keeps the traffic of all rounds.

    Attributes:
        rounds: one RoundTraffic a train round.
    """

    def __init__(self) -> None:
        self.rounds: list[RoundTraffic] = []
        self.restart()

    def restart(self) -> None:
        """Another training begins; its rounds follow those before."""
        self._plain: set[int] = set()  # nodes whose uncompressed replies were told of

    def begin(self, server_round: int, messages: list[Message]) -> None:
        """Train messages are about to be sent."""
        self.rounds.append(RoundTraffic(server_round, messages=len(messages), bytes_down=payload(messages)))

    def count(self, server_round: int, **counts: Any) -> RoundTraffic:
        """Set counts in the traffic of a round, which is begun where somebody else made the messages."""
        if not self.rounds or self.rounds[-1].round != server_round:
            self.rounds.append(RoundTraffic(server_round))
        self.rounds[-1] = replace(self.rounds[-1], **counts)
        return self.rounds[-1]

    def complete(
        self, server_round: int, replies: list[Reply], sent: SentRound, used: Collection[Notes]
    ) -> RoundTraffic:
        """Complete a round's traffic, and log what was dropped and reset.

        Args:
            server_round: number of the round.
            replies: as they came out: those that were refused along the way are marked.
            sent: what the messages said.
            used: of the frames that counted.
        """
        arrived = [reply for reply in replies if reply.arrived]
        causes = Counter(reply.cause for reply in replies if reply.cause)
        answered = Counter(reply.node for reply in replies if reply.cause not in UNASKED)
        causes["missing"] = sum((sent.asked - answered).values())
        messages = sent.asked.total() or len(replies)
        traffic = self.count(
            server_round,
            messages=messages,
            uploads=len(arrived),
            failures=max(messages - sum(not reply.cause for reply in replies), 0),
            bytes_up=sum(reply.payload for reply in arrived),
            wire_up=sent.wire_up(replies),
            dropped={cause: count for cause, count in sorted(causes.items()) if count},
            resets=sum(notes.reset for notes in used),
            shortened=sum(notes.shortened for notes in used),
        )
        self._log_replies(server_round, replies, sent)
        if traffic.dropped:
            log.warning("round %d: replies dropped by cause: %s", server_round, traffic.dropped)
        if traffic.resets:
            log.warning("round %d: %d clients had lost what feedback remembers", server_round, traffic.resets)
        return traffic

    def _log_replies(self, server_round: int, replies: Iterable[Reply], sent: SentRound) -> None:
        for reply in replies:
            if reply.cause:
                log.warning("round %d: node %d: %s", server_round, reply.node, reply.message.error.reason)
            elif reply.notes is None and reply.node in sent.sent and reply.node not in self._plain:
                self._plain.add(reply.node)  # once, not every round
                reason = reply.declined or "no fedcomp there, or one that cannot do what is asked for"
                log.info(
                    "round %d: node %d replies uncompressed, which is averaged along: %s",
                    server_round, reply.node, reason,
                )  # fmt: skip

    def add_evaluation(self, server_round: int, replies: Iterable[Reply], sent: SentRound) -> None:
        """Add what the evaluate messages of a round have cost on the uplink."""
        if sent.objects:
            so_far = self.rounds[-1].wire_up if self.rounds and self.rounds[-1].round == server_round else 0
            self.count(server_round, wire_up=so_far + sent.wire_up(replies))

    def report(self, server_round: int, metrics: Mapping[str, object] | None, of_round: int) -> None:
        """Log the line about a round where Flower logs what it does.

        Args:
            server_round: number of the round.
            metrics: of an evaluation; None: there was none.
            of_round: whose model it is of.
        """
        if self.rounds and self.rounds[-1].round == server_round:
            flower_log.info("\t└──> %s", self.rounds[-1].line(metrics, of_round))

    def with_dropped(self, metrics: MetricRecord | None) -> MetricRecord | None:
        """The metrics with the counts of the last round's dropped replies by cause, for the strategy's result."""
        dropped = {f"{DROPPED}{cause}": count for cause, count in self.rounds[-1].dropped.items()}
        return MetricRecord({**(metrics or {}), **dropped}) if dropped else metrics
