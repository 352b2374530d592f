"""Compressed: wraps any strategy of Flower's Message API so that clients upload frames instead of models.

``Compressed(FedAdam(...), uplink="topk(0.01)", feedback="ef")`` is all a server needs. It goes around everything else,
privacy wrappers included. Clients without fedcomp reply plainly and are averaged along.
"""

import logging
import math
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedcomp import (
    Auto,
    CAFe,
    Codec,
    ConfigError,
    FedcompError,
    Feedback,
    FetchSGD,
    LayoutError,
    NoFeedback,
    Plan,
    _validate,
    as_feedback,
    generator,
    wire,
)
from fedcomp.compressor import apply
from fedcomp.device import resolve
from fedcomp.layout import Layout, Vector, check_finite, check_same_tensors
from fedcomp.monitor import Monitor, Sink
from fedcomp.request import ACK, ACKS, KEY, MODEL_STYPE, PLACE, Request, has_floats
from fedcomp.schedule import Schedule, as_schedule
from fedcomp_strategies.acks import Acknowledgements
from fedcomp_strategies.aggregator import Aggregator, Mean
from fedcomp_strategies.averaging import averaged_reply, averages, metrics_of, traits_of
from fedcomp_strategies.downlink import Downlink
from fedcomp_strategies.feedback import SERVER, ServerFeedback
from fedcomp_strategies.guards import MovingAverage, capped
from fedcomp_strategies.privacy import Bound
from fedcomp_strategies.rates import LEAST_BITS, Rates, choose, notes_size
from fedcomp_strategies.records import (
    Model,
    copies,
    identity,
    integers_in,
    is_finite,
    nbytes,
    to_record,
    views,
)
from fedcomp_strategies.replies import Reply, cause_of, triage, triage_evaluation, weight_key, weight_of
from fedcomp_strategies.traffic import RoundTraffic, payload

log = logging.getLogger("fedcomp")

DROPPED = "fedcomp-dropped-"
"""Prefix of the metrics that count dropped replies by cause."""

_UNASKED = ("foreign", "repeated")
"""Causes of replies that the inner strategy hears nothing of."""


@dataclass
class _Round:
    """What the messages of a round have said, kept until the replies are in.

    Attributes:
        arrays: the global model.
        asked: messages by node.
        sent: the model that the inner strategy sent to each node that was asked for a frame.
        packed: nodes that got the model as a package.
        told: the model as those nodes hold it, where the downlink loses something.
    """

    arrays: ArrayRecord
    asked: Counter[int] = field(default_factory=Counter)
    sent: dict[int, ArrayRecord] = field(default_factory=dict)
    packed: set[int] = field(default_factory=set)
    told: Model = field(default_factory=dict)
    _bases: dict[Any, Model] = field(default_factory=dict)

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
class _Outcome:
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


class Compressed(Strategy):
    """Any strategy, with compressed uploads and a packed downlink.

    Strategies that average (FedAvg and its optimisers) are given one reply with the mean, which is summed straight from
    the frames; all others see ordinary replies with whole models.

    Args:
        strategy: the strategy to wrap.
        uplink: what clients do with their updates: a codec, its text such as ``"topk(0.01, values=uniform(8))"``, or
            a Plan, or a Schedule of them over the rounds. A text with "auto", as in "auto" or "float32 | 3: auto", and
            a budget: the codec and all that is left to "auto" below are chosen for the model, see `rates`; the log
            says what and why.
        budget: bytes of an upload for `auto` in the uplink: "2 kB", "0.05 bits" (per parameter), "30 s at 20 kbit/s",
            "1/1000" (of float32), a number of bytes, or several over the rounds: "500 B | 10: 2 kB",
            "60 B to 640 B over 50 rounds".
        shared: whether the budget is what uploads have on average: clients of large weight send more, up to four times
            it, which is the better use of as many bytes. If not, or under strategies that do not average, or with a
            monitor, no upload is longer than the budget.
        feedback: what makes up for losses: "none", "ef", "cafe", "dgc", "fetchsgd", "ef21", with arguments as in
            ``"cafe(beta=0.8)"``. "auto": none, unless the uplink is "auto".
        downlink: "pack": the model travels as one array without loss, to clients known to understand it; a codec, its
            text or a Plan: as compressed differences, with error feedback at the server; "plain": as the inner strategy
            sends it.
        mixed_fleet: whether some clients may not have fedcomp. If so, each gets plain models until it has answered with
            a frame; if not, all get packed models from the start.
        device: where updates are summed: "cpu", "cuda", "auto" for CUDA where there is some.
        integers: what becomes of integer tensors such as batch counters under strategies that average: "mean" (what
            Flower does, in float64) or "max" (the largest, in their own dtype).
        seed: feeds all randomness of the codecs, together with round and partition.
        monitor: called with statistics of each tensor of each decoded update; every update is decoded for it.
        norm_cap: how long the mean update of the coded tensors may be, in mean lengths of the clients' updates, before
            the inner strategy gets it; longer ones are scaled down. Clients note the lengths in their frames (2 bytes).
            For unbiased codecs far below one bit: at 1 or above no mean of exact updates is ever touched. Lower:
            shorter, safer steps. What is cut off is lost, also under `ef`; `dgc`, whose steps are meant to be longer
            than the updates, wants a higher one. Only under strategies that average. None: no cap. "auto": none, unless
            the uplink is "auto".
        average: decay of a moving average of the models of all rounds, above 0 to 0.999; 0: none. Larger: less noise,
            further behind. Training goes on with the newest model; what is evaluated, and returned by `start`, is the
            average.

    Attributes:
        traffic: one RoundTraffic a train round.

    Raises ConfigError for an unknown codec or feedback, or for one that diverges around the codec. A budget that is too
    small for the model ends the first round with BudgetError, which tells the smallest that works.
    """

    def __init__(
        self,
        strategy: Strategy,
        uplink: Schedule | Plan | Codec | str,
        *,
        budget: str | float | None = None,
        shared: bool = True,
        feedback: Feedback | str = "auto",
        downlink: Plan | Codec | str = "pack",
        mixed_fleet: bool = True,
        device: str = "auto",
        integers: str = "mean",
        seed: int = 0,
        monitor: Sink | None = None,
        norm_cap: float | str | None = "auto",
        average: float = 0.0,
    ) -> None:
        _validate.one_of(choices=("mean", "max"), integers=integers)
        _validate.flag(mixed_fleet=mixed_fleet)
        _validate.flag(shared=shared)
        self.strategy = strategy
        self.traffic: list[RoundTraffic] = []
        self.monitor = monitor
        self.integers = integers
        self.device = resolve(device)
        self._bound = Bound(strategy)
        self._mixed = mixed_fleet
        self._left_open = isinstance(uplink, str) and any(p.codec == Auto() for p in as_schedule(uplink).plans())
        self._wanted = None if feedback == "auto" else as_feedback(feedback)
        self._wanted_cap = norm_cap
        self._schedule = _with_budget(as_schedule(uplink), budget)
        self._rates = Rates(shared and averages(strategy) and monitor is None)
        self._feedback = ServerFeedback(self._wanted or NoFeedback(), seed)
        self._downlink = None if downlink == "plain" else Downlink(None if downlink == "pack" else downlink, seed)
        norm_cap = None if norm_cap == "auto" else norm_cap
        self._norm_cap = None if norm_cap is None else _validate.number(low=0, high=1e6, above=True, norm_cap=norm_cap)
        self._moving = MovingAverage(average) if _validate.number(low=0, high=0.999, average=average) else None
        measured = norm_cap is not None and averages(strategy)
        plan = self._schedule.plan(1)
        self._request = Request(plan, 0, self._feedback.feedback, seed, _new_session(), measured)
        self._check(strategy)
        self._exact: set[str] = set()  # names of integers: Flower makes floats of them, from one training to the next
        self._forget_training()

    def _check(self, strategy: Strategy) -> None:
        """Refuse what cannot work before the run, and say what will not work well."""
        feedback, traits = self._feedback.feedback, traits_of(strategy)
        name = traits.name
        if isinstance(strategy, Compressed):
            raise ConfigError(f"{name} compresses already: wrap Flower's own strategy, once")
        plans = self._schedule.plans()
        for plan in plans:
            feedback.check(plan)
            if any(isinstance(rule.codec, Auto) for rule in plan.rules):
                raise ConfigError(
                    "rules cannot use auto: a budget is for the whole upload; give it as the plan's codec"
                )
        if self._feedback.needs_mean and (not averages(strategy) or self.monitor is not None):
            raise ConfigError(
                f"feedback {feedback.name!r} computes with the mean of all updates, which {name} does not take, or a "
                "monitor prevents; use a strategy that averages, such as FedAvg, without a monitor, or feedback='ef'"
            )
        if self._feedback.needs_mean and self._norm_cap is not None:
            raise ConfigError(
                f"norm_cap does not go with feedback {feedback.name!r}, whose server counts on every step being taken "
                "whole; use feedback 'none', 'ef', 'cafe' or 'dgc', or norm_cap=None"
            )
        if isinstance(feedback, FetchSGD) and len({plan.codec for plan in plans}) > 1:
            raise ConfigError("feedback 'fetchsgd' adds sketches over rounds: the schedule must keep to one sketch")
        if isinstance(feedback, CAFe) and self._downlink is None:
            raise ConfigError("feedback 'cafe' sends its predictor in packages: downlink must not be 'plain'")
        if traits.adaptive and not isinstance(feedback, NoFeedback):
            log.warning(
                "feedback %s under %s: adaptive server steps lose accuracy with biased codecs and feedback; "
                "an unbiased codec such as eden(0.1) without feedback holds up better", feedback, name,
            )  # fmt: skip
        chosen = self._left_open and self._wanted is None
        if traits.momentum and isinstance(feedback, CAFe) and not chosen:
            log.warning(
                "feedback %s carries momentum itself: it does not go well with the momentum of %s", feedback, name
            )
        if isinstance(feedback, NoFeedback) and not self._left_open and any(_loses(plan.codec) for plan in plans):
            log.warning("auto without feedback loses accuracy at low rates; use auto(..., unbiased=True), or feedback")
        if traits.private and feedback.slots:
            log.warning("feedback %s under %s: residuals carry what was not noised from round to round", feedback, name)
        if type(strategy).start is not Strategy.start:
            log.warning("%s has a start() of its own, which the wrapped strategy does not use", name)

    def _forget_training(self) -> None:
        """Begin as if nothing had been sent or received before."""
        self._acks = Acknowledgements()
        self._aware: set[int] = set()
        self._begun = False
        self._keepers: set[int] = set()
        self._learnt: dict[Plan, Plan] = {}
        self._monitors: dict[int, Monitor] = {}
        self._round: _Round | None = None
        self._trained: Layout | None = None  # of the model that the training began with: strategies widen dtypes later
        self._uncapped_told = False
        self._feedback.restart()
        self._rates.restart()
        if self._downlink is not None:
            self._downlink.restart()
        # Brings the moving average, of which nodes keep nothing.
        self._evaluation = None if self._downlink is None else Downlink(None)
        if self._moving is not None:
            self._moving.restart()

    def __getattr__(self, name: str) -> Any:
        """Attributes of the wrapped strategy, for code that reads them."""
        if name == "strategy":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def summary(self) -> None:
        """Log what is wrapped and what clients are asked for."""
        log.info("uplink %s, feedback %s", self._request.plan.to_config(), self._request.feedback)
        self.strategy.summary()

    @property
    def averaged(self) -> ArrayRecord | None:
        """The moving average of the model; None without `average`, or before the first round of a training."""
        return None if self._moving is None else self._moving.record

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Flower's own, except that with `average` evaluate_fn is given the moving average, and the result holds it."""
        if self._moving is None:
            return super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)
        self._moving.restart()  # or the start would be evaluated as the end of the training before

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            assert evaluate_fn is not None
            return evaluate_fn(server_round, arrays if self.averaged is None else self.averaged)

        given = None if evaluate_fn is None else evaluate
        result = super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, given)
        if self.averaged is not None:
            result.arrays = self.averaged
        return result

    # --- down --------------------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The inner strategy's train messages, each with the request for this round."""
        if server_round <= self._request.round:  # another training with the same strategy
            self._request = replace(self._request, session=_new_session())
            self._forget_training()
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self._bound.announce()
        if not self._begun:
            self._begun = True
            self._exact |= integers_in(arrays)
            self._settle(arrays, len(messages))
        plan = self._feedback.feedback.plan(self._learnt_plan(server_round), server_round)
        plan = self._announced(plan)
        self._request = replace(self._request, round=server_round, plan=plan, feedback=self._feedback.feedback)
        asked = Counter(message.metadata.dst_node_id for message in messages)
        self._round = _Round(arrays, asked)
        told = self._tell_acks(grid, set(asked))
        models, request = self._models(messages), self._request.to_text()
        placed = isinstance(plan.codec, Auto) and plan.codec.unbiased
        for index, message in enumerate(messages):
            records = list(message.content.array_records.values())
            node = message.metadata.dst_node_id
            # Two replies of one node could not be told apart: such nodes reply plainly.
            if len(records) == 1 and asked[node] == 1 and identity(records[0]) in models:
                self._round.sent[node] = records[0]
                place = {PLACE: index / len(messages)} if placed else {}
                message.content = _with_config(message.content, {KEY: request, **place, **told.get(node, {})})
        self._pack(messages, models, server_round, self._downlink, self._feedback.predictor_frame)
        self.traffic.append(RoundTraffic(server_round, messages=len(messages), bytes_down=payload(messages)))
        return messages

    def _settle(self, arrays: ArrayRecord, clients: int) -> None:
        """Choose what was left to "auto", now that the model is known. Raises ConfigError if it cannot work."""
        self._trained = _layout_of(arrays)
        layout = self._trained
        if layout is None:
            return None
        if not self._left_open:
            return self._check_budgets(layout)
        budgets = [p.codec.limit(layout.size) or 0 for p in self._schedule.plans() if isinstance(p.codec, Auto)]
        bits = 8 * min(budgets) / max(layout.size, 1)
        predictors = self._downlink is not None
        choice = choose(layout, bits, clients, self.strategy, self._wanted, predictors=predictors)
        self._schedule = replace(
            self._schedule,
            phases=tuple((r, replace(p, codec=_biased(p.codec, choice.unbiased))) for r, p in self._schedule.phases),
        )
        if self._wanted is None:
            self._feedback = ServerFeedback(choice.feedback, self._request.seed)
        if self._wanted_cap == "auto":
            self._norm_cap = choice.norm_cap
        measured = self._norm_cap is not None and averages(self.strategy)
        self._request = replace(self._request, norm=measured)
        log.info(
            "auto: %s coding in %.3g bits per parameter, %s, feedback %s, norm cap %s: %s",
            "unbiased" if choice.unbiased else "biased", bits, "shared by weight" if self._rates.shared else "each",
            self._feedback.feedback, self._norm_cap, choice.reason,
        )  # fmt: skip
        if bits < LEAST_BITS:
            log.warning(
                "auto: %.3g bits per parameter are below %g, where accuracy is lost whatever the setting; "
                "`fedcomp advise` shows what larger budgets bring", bits, LEAST_BITS,
            )  # fmt: skip
        self._check(self.strategy)
        return self._check_budgets(layout)

    def _check_budgets(self, layout: Layout) -> None:
        """Raise BudgetError for any budget of the schedule that no frame for this layout fits."""
        for plan in self._schedule.plans():
            self._rates.check(plan, layout, notes_size(self._request.norm, self._feedback.feedback))

    def _announced(self, plan: Plan) -> Plan:
        """The plan with the step that this round's clients code at. Raises BudgetError if the budget is too small."""
        told = isinstance(plan.codec, Auto) and self._trained is not None and self._rates.shared
        self._request = replace(self._request, weight=weight_key(self.strategy) or "" if told else "")
        if self._trained is None:
            return plan
        return self._rates.plan(plan, self._trained, notes_size(self._request.norm, self._feedback.feedback))

    def _learnt_plan(self, server_round: int) -> Plan:
        planned = self._schedule.plan(server_round)
        return self._learnt.get(planned, planned)

    def _models(self, messages: list[Message]) -> set[Any]:
        """Which records in the messages, by identity, are models of dtypes that frames can be about.

        Others pass through as they are. Messages usually share one record, which is looked at once.
        """
        records = {identity(record): record for m in messages for record in m.content.array_records.values()}
        models = set()
        for known, record in records.items():
            try:
                Layout.of(views(record))
                models.add(known)
            except LayoutError as error:
                if not self.traffic:  # once
                    log.warning("models are sent and received uncompressed: %s", error)
        return models

    def _tell_acks(self, grid: Grid, nodes: set[int]) -> dict[int, dict[str, Any]]:
        """What to tell each node about its former uploads."""
        if not self._request.feedback.slots:
            return {}
        told = {node: self._acks.told(node) for node in nodes}
        orphans = self._acks.orphans(set(grid.get_node_ids())) if None in told.values() else []
        return {
            node: {ACK: round_} if round_ is not None else {ACKS: orphans} if orphans else {}
            for node, round_ in told.items()
        }

    def _pack(
        self,
        messages: list[Message],
        models: set[Any],
        server_round: int,
        downlink: Downlink | None,
        predictor: bytes | None = None,
    ) -> None:
        """Replace the global model in the messages by packages, for nodes that can read them."""
        if downlink is None or self._round is None:
            return
        records: dict[bytes, ArrayRecord] = {}  # messages share theirs, and should go on doing so
        published = None
        for message in messages:
            node = message.metadata.dst_node_id
            sent = message.content.array_records
            if (self._mixed and node not in self._aware) or len(sent) != 1:
                continue
            ((key, record),) = sent.items()
            known = identity(record)
            if published is None and has_floats(record) and known in models:
                downlink.publish(views(record), server_round)
                published = known
            if known != published:  # strategies with several models at once
                continue
            data = downlink.package(node, predictor)
            packed = Array(dtype="uint8", shape=(len(data),), stype=MODEL_STYPE, data=data)
            message.content = RecordDict({**message.content, key: records.setdefault(data, ArrayRecord({KEY: packed}))})
            if downlink is self._downlink:
                self._round.packed.add(node)
        if published is not None and downlink.plan is not None:
            self._round.told = dict(downlink.told)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The inner strategy's evaluate messages, with the model packed as for training.

        The moving average, where there is one, is always sent whole: nodes go on holding the model that is trained.
        """
        averaged, downlink = self.averaged, self._downlink
        if averaged is not None:
            arrays, downlink = averaged, self._evaluation
        messages = list(self.strategy.configure_evaluate(server_round, arrays, config, grid))
        self._round = _Round(arrays)
        self._pack(messages, self._models(messages), server_round, downlink)
        if messages:
            self._count(server_round, bytes_down_evaluate=payload(messages))
        return messages

    # --- up ----------------------------------------------------------------------------------------------------------

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode the replies and hand them to the inner strategy.

        A reply that is damaged, inconsistent, late, repeated, foreign or not finite is dropped, alone, and counted by
        cause: in `traffic`, in the log and in the metrics of the result. If nothing usable is left, or all weights are
        zero, the old model stays.
        """
        sent, self._round = self._round or _Round(ArrayRecord()), None
        replies = list(replies)
        key = weight_key(self.strategy)
        opened = triage(replies, sent.asked, server_round, key)
        if self._takes_mean(sent, opened):
            outcome = self._average(server_round, opened, sent, str(key))
        else:
            outcome = self._hand_over(server_round, opened, sent, key)
        used = {r.node: r.notes for r in outcome.replies if r.node in outcome.counted and r.notes is not None}
        for node in sent.asked.keys() - {reply.node for reply in outcome.replies if not reply.cause}:
            self._acks.miss(node)
        self._confirm(outcome.replies, sent)
        good = {reply.node: reply for reply in outcome.replies if reply.node in used and reply.array is not None}
        self._rates.observe(
            self._feedback.feedback.plan(self._learnt_plan(server_round), server_round),
            [len(reply.array.data) for reply in good.values() if reply.array is not None],
            {node: outcome.levels[node] for node in good if node in outcome.levels},
            {node: weight_of(reply.message, key) for node, reply in good.items()},
        )
        self._account(replies, outcome.replies, sent, list(used.values()))
        arrays = outcome.arrays
        if arrays is not None and not is_finite(arrays):
            log.error("round %d: the aggregated model is not finite, the old model stays", server_round)
            arrays = None
        if arrays is None:
            self._feedback.learn(None, {}, server_round)
        else:
            self._feedback.commit()
            for node, notes in used.items():
                self._feedback.succeed(self._acks.former(node, notes.number), node)
                self._acks.accept(node, server_round, notes.number)
            self._learn(sent.arrays, arrays, outcome.update)
            if self._moving is not None:
                self._moving.add(arrays, self._exact)
        if self._feedback.out_of_step:
            log.warning("round %d: a client has lost its memory, so all begin anew with feedback", server_round)
            self._request = replace(self._request, session=_new_session())
            self._acks = Acknowledgements()
            self._feedback.restart()
        return arrays, self._count_dropped(outcome.metrics)

    def _takes_mean(self, sent: _Round, replies: list[Reply]) -> bool:
        """Whether the inner strategy can be given the mean.

        So it is if it averages, all replies are about one model of floats, and no monitor wants to see each of them.
        """
        models = [sent.sent.get(reply.node) for reply in replies if not reply.cause]
        if not models or models[0] is None or self.monitor is not None or not averages(self.strategy):
            return False
        known = identity(models[0])
        return has_floats(models[0]) and all(model is not None and identity(model) == known for model in models)

    def _average(self, server_round: int, replies: list[Reply], sent: _Round, key: str) -> _Outcome:
        """Hand the inner strategy one reply with the mean."""
        base = next(sent.base(reply.node) for reply in replies if not reply.cause)
        aggregator = Aggregator(
            base,
            self._request.plan,
            round=server_round,
            device=self.device,
            tables=isinstance(self._request.feedback, FetchSGD),
            exact=self._exact,
        )
        weights = {
            reply.node: self._feedback.weight(reply.node, weight_of(reply.message, key))
            for reply in replies
            if not reply.cause
        }
        opened = [self._collect(reply, aggregator, sent, weights) for reply in replies]
        mean = aggregator.mean()
        failed = mean.failed
        opened = [r.refused(cause_of(failed[r.node]), failed[r.node]) if r.node in failed else r for r in opened]
        counted = {r.node for r in opened if not r.cause and weights[r.node]}
        heavy = {r.node for r in opened if not r.cause and weight_of(r.message, key)}
        if not self._any(server_round, opened, counted & heavy):
            return _Outcome(opened)
        good = [reply for reply in opened if not reply.cause]
        framed = sum(weights[r.node] for r in good if r.notes is not None and r.node in sent.packed) / mean.weight
        for name, values in mean.verbatim.items():  # from clients that were told the model with a loss
            if framed and sent.told and base[name].dtype.kind == "f":
                mean.verbatim[name] = np.asarray(values + framed * (base[name].astype(np.float64) - sent.told[name]))
        mean = self._feedback.step(mean, aggregator.buckets, {reply.node: weights[reply.node] for reply in good})
        if self._norm_cap is not None:
            mean = self._capped(server_round, mean, aggregator, weights)
        model = ArrayRecord({name: Array(values) for name, values in mean.tensors(base, self.integers)})
        update = mean.update if self._feedback.learns else None
        largest = mean.largest if self.integers == "max" else {}
        levels = mean.levels
        del mean, aggregator  # a model each, which the strategy may need the room of
        messages = [reply.message for reply in good]
        with metrics_of(self.strategy, messages):
            averaged = averaged_reply(messages, model, key)
            arrays, metrics = self.strategy.aggregate_train(server_round, [averaged, *_errors(opened)])
        if arrays is not None:
            arrays = ArrayRecord({**arrays, **{name: Array(values) for name, values in largest.items()}})
        return _Outcome(opened, arrays, metrics, update, counted, levels)

    def _capped(self, server_round: int, mean: Mean, aggregator: Aggregator, weights: Mapping[int, float]) -> Mean:
        """The mean with its update no longer than the norm cap allows."""
        step = capped(mean.update, aggregator.norms(mean), weights, self._norm_cap or 0)
        if step.factor < 1:
            log.info(
                "round %d: mean update of length %.4g, scaled down to the norm cap of %.4g",
                server_round, step.length, step.most,
            )  # fmt: skip
            self._count(server_round, capped=step.factor)
        return replace(mean, update=step.update)

    def _collect(self, reply: Reply, aggregator: Aggregator, sent: _Round, weights: Mapping[int, float]) -> Reply:
        """Give a reply to the aggregator, which tells later whether it was any good."""
        if reply.cause:
            return reply
        try:
            if reply.array is None or reply.notes is not None:  # what is wrong with other frames is told below
                self._feedback.check(reply.node, reply.notes)
            if reply.array is not None:
                aggregator.add(reply.frame(), weights[reply.node], node=reply.node)
            else:
                aggregator.add_plain(self._plain(reply, sent), weights[reply.node], node=reply.node)
        except FedcompError as error:
            return reply.refused(cause_of(error), error)
        return reply

    def _hand_over(self, server_round: int, replies: list[Reply], sent: _Round, key: str | None) -> _Outcome:
        """Hand the inner strategy every client's model."""
        if self._feedback.needs_mean and any(not reply.cause for reply in replies):
            log.error(
                "round %d: feedback %s needs the mean of updates of one model, but nodes were sent different ones; the "
                "old model stays", server_round, self._request.feedback,
            )  # fmt: skip
            return _Outcome(replies)
        if self._norm_cap is not None and not self._uncapped_told and any(not reply.cause for reply in replies):
            self._uncapped_told = True
            log.warning(
                "round %d: the norm cap does not apply: %s is given every client's model, not their mean",
                server_round, traits_of(self.strategy).name,
            )  # fmt: skip
        if traits_of(self.strategy).picks_replies:
            replies = [self._with_weight(reply, key) for reply in replies]
        opened = [self._open(reply, sent) for reply in replies]
        heavy = {r.node for r in opened if not r.cause and (key is None or weight_of(r.message, key))}
        if not self._any(server_round, opened, heavy):
            if errors := _errors(opened):  # adaptive clipping divides by their number
                self.strategy.aggregate_train(server_round, errors)
            return _Outcome(opened)
        messages = [reply.message for reply in opened if reply.cause not in _UNASKED]
        arrays, metrics = self.strategy.aggregate_train(server_round, messages)
        counted = {r.node for r in opened if not r.cause} if traits_of(self.strategy).ignores_weights else heavy
        return _Outcome(opened, arrays, metrics, counted=counted)

    def _with_weight(self, reply: Reply, key: str | None) -> Reply:
        """The reply, refused if it weighs nothing: the strategy might pick it alone, and divide by zero."""
        if reply.cause or key is None or weight_of(reply.message, key):
            return reply
        return reply.refused(
            "weight", f"expected the metric {key!r} above 0 with {traits_of(self.strategy).name}, got 0"
        )

    def _open(self, reply: Reply, sent: _Round) -> Reply:
        """The reply with a whole model in it, or an error reply that says why it was refused."""
        if reply.cause:
            return reply
        if reply.node not in sent.sent:
            unasked = "expected an uncompressed reply, as no frame was asked for"
            return reply if reply.array is None else reply.refused("mismatch", unasked)
        try:
            if reply.array is None and not has_floats(sent.sent[reply.node]):
                return reply  # nothing that we asked for, such as the trees of FedXgbBagging
            self._feedback.check(reply.node, reply.notes)
            model = self._plain(reply, sent) if reply.array is None else self._decode(reply, sent)
            model = self._bound(sent.base(reply.node), model, reply.node)
        except FedcompError as error:
            return reply.refused(cause_of(error), error)
        ((key, _),) = reply.message.content.array_records.items()
        content = RecordDict({**reply.message.content, key: to_record(model)})
        message: Message = Message(content=content, metadata=reply.message.metadata)  # type: ignore[call-overload]
        return replace(reply, message=message)

    def _decode(self, reply: Reply, sent: _Round) -> Model:
        base = sent.base(reply.node)
        contents = wire.unpack(reply.frame(), Layout.of(base), plan=self._request.plan, round=self._request.round)
        model = apply(contents, self._feedback.shifted(base) if contents.notes.predicted else base)
        model = sent.corrected(reply.node, model, contents.verbatim)
        if self.monitor is not None:
            node = self._monitors.setdefault(reply.node, Monitor(self.monitor))
            node.observe(self._request.round, base, model)
        return model

    def _plain(self, reply: Reply, sent: _Round) -> Model:
        """The model of an uncompressed reply in the order of the base, which some strategies match it by.

        Raises FedcompError unless it fits the model that was sent and is finite.
        """
        base = sent.base(reply.node)
        try:
            model = copies(next(iter(reply.message.content.array_records.values())))
        except Exception as error:  # whatever numpy says of a stranger's bytes, they must not end the run
            raise LayoutError(f"uncompressed reply cannot be read: {error}") from error
        check_same_tensors(base, model, "uncompressed reply")
        Layout.of(model)  # refuses dtypes that no model has
        for name, values in model.items():
            if values.dtype.kind == "f":
                check_finite(name, values)
        return sent.corrected(reply.node, {name: model[name] for name in base}, base)

    def _any(self, server_round: int, replies: list[Reply], heavy: Collection[int]) -> bool:
        """Whether any reply counts; if not, say so. Flower divides by the sum of the weights."""
        if all(reply.cause for reply in replies):
            log.error("round %d: none of %d replies can be used, the old model stays", server_round, len(replies))
        elif not heavy:
            log.error("round %d: all replies have weight zero, the old model stays", server_round)
        else:
            return True
        return False

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The inner strategy's evaluation, without replies that are inconsistent or have an impossible weight."""
        sent, self._round = self._round or _Round(ArrayRecord()), None
        key = weight_key(self.strategy)
        checked = triage_evaluation(replies, key)
        self._confirm(checked, sent)
        good = [reply.message for reply in checked if not reply.cause]
        if key is not None and good and not any(weight_of(message, key) for message in good):
            log.warning("round %d: all evaluations have weight zero and are left out", server_round)
            checked = [reply for reply in checked if reply.cause]
        return self.strategy.aggregate_evaluate(server_round, [reply.message for reply in checked])

    # --- what a round leaves behind ----------------------------------------------------------------------------------

    def _confirm(self, replies: list[Reply], sent: _Round) -> None:
        """Remember which nodes understand packages, and which of them hold the model of this round."""
        for reply in replies:
            if reply.notes is not None and reply.version == wire.VERSION:
                self._aware.add(reply.node)  # older ones could not read the frames in packages
            elif sent.sent and reply.cause in ("error", "stale"):  # perhaps it cannot read packages any more
                self._aware.discard(reply.node)
            if self._downlink is None or reply.node not in sent.packed:
                continue
            if reply.notes is not None and not reply.notes.unkept:
                self._keepers.add(reply.node)
            elif reply.notes is not None or reply.cause == "stale":
                self._keepers.discard(reply.node)
            if reply.node not in self._keepers:  # other replies do not say whether the model was kept
                self._downlink.forget(reply.node)
            elif not reply.cause:
                self._downlink.confirm(reply.node)

    def _count(self, server_round: int, **counts: Any) -> RoundTraffic:
        """Set counts in the traffic of a round, which is begun where somebody else made the messages."""
        if not self.traffic or self.traffic[-1].round != server_round:
            self.traffic.append(RoundTraffic(server_round))
        self.traffic[-1] = replace(self.traffic[-1], **counts)
        return self.traffic[-1]

    def _account(self, replies: list[Message], opened: list[Reply], sent: _Round, used: list[wire.Notes]) -> None:
        """Complete the round's traffic, and log what was dropped and reset."""
        round_ = self._request.round
        arrived = [m for m in replies if not m.has_error()]
        causes = Counter(reply.cause for reply in opened if reply.cause)
        answered = Counter(reply.node for reply in opened if reply.cause not in _UNASKED)
        causes["missing"] = sum((sent.asked - answered).values())
        messages = sent.asked.total() or len(opened)
        traffic = self._count(
            round_,
            messages=messages,
            uploads=len(arrived),
            failures=max(messages - sum(not reply.cause for reply in opened), 0),
            bytes_up=sum(nbytes(record) for m in arrived for record in m.content.array_records.values()),
            dropped={cause: count for cause, count in sorted(causes.items()) if count},
            resets=sum(notes.reset for notes in used),
            shortened=sum(notes.shortened for notes in used),
        )
        for reply in opened:
            if reply.cause:
                log.warning("round %d: node %d: %s", round_, reply.node, reply.message.error.reason)
        if traffic.dropped:
            log.warning("round %d: replies dropped by cause: %s", round_, traffic.dropped)
        if traffic.resets:
            log.warning("round %d: %d clients had lost what feedback remembers", round_, traffic.resets)
        if arrived and not (isinstance(self._request.plan.codec, Auto) and self._rates.shared):
            parameters = sum(math.prod(array.shape) for array in sent.arrays.values())
            self._feedback.warn_of_starvation(8 * traffic.bytes_up / len(arrived) / max(parameters, 1))

    def _count_dropped(self, metrics: MetricRecord | None) -> MetricRecord | None:
        """The metrics with the counts of this round's dropped replies by cause, for the strategy's result."""
        dropped = {f"{DROPPED}{cause}": count for cause, count in self.traffic[-1].dropped.items()}
        return MetricRecord({**(metrics or {}), **dropped}) if dropped else metrics

    def _learn(self, before: ArrayRecord, arrays: ArrayRecord, update: Mapping[str, Vector] | None) -> None:
        """Let feedback, and codecs with shared side information, look at what has happened to the global model."""
        round_ = self._request.round
        plan = self._learnt_plan(round_)
        adapts = any(type(codec).adapt is not Codec.adapt for codec in plan.codecs())
        if not adapts and not self._feedback.learns:
            return
        old, new = views(before), views(arrays)
        with np.errstate(over="ignore", invalid="ignore"):
            moved = {
                n: (new[n] - old[n]).astype(np.float32)
                for n in old
                if new[n].dtype.kind == "f" and n not in self._exact
            }
        finite = all(np.isfinite(values).all() for values in moved.values())
        if self._feedback.learns:  # where no mean was computed, the model's own move has to do
            coded = [t.name for b in plan.buckets(Layout.of(new)) for t in b.layout.tensors if t.name in moved]
            seen = update if update is not None else {name: moved[name] for name in coded} if finite else None
            self._feedback.learn(seen, new, round_)
        if adapts and finite:
            layout = Layout.of({n: new[n] for n in moved})
            rng = generator(self._request.seed, round_, SERVER)
            self._learnt[self._schedule.plan(round_)] = plan.adapt(moved, layout, rng)


def _with_budget(schedule: Schedule, budget: str | float | None) -> Schedule:
    """The schedule with the budget. Raises ConfigError if `auto` is left without one."""
    schedule = schedule if budget is None else schedule.with_budget(budget)
    if any(isinstance(codec, Auto) and not codec.budget for plan in schedule.plans() for codec in plan.codecs()):
        raise ConfigError('uplink "auto" needs the budget of an upload, such as budget="2 kB"')
    return schedule


def _layout_of(arrays: ArrayRecord) -> Layout | None:
    """The layout of a model; None if frames cannot be about it."""
    try:
        return Layout.of(views(arrays)) if has_floats(arrays) else None
    except LayoutError:
        return None


def _loses(codec: Codec) -> bool:
    return isinstance(codec, Auto) and not codec.unbiased


def _biased(codec: Codec, unbiased: bool) -> Codec:
    return replace(codec, unbiased=unbiased) if isinstance(codec, Auto) else codec


def _new_session() -> str:
    return secrets.token_hex(4)


def _errors(replies: list[Reply]) -> list[Message]:
    return [reply.message for reply in replies if reply.cause and reply.cause not in _UNASKED]


def _with_config(content: RecordDict, told: dict[str, Any]) -> RecordDict:
    """The content with these entries in its configuration, whatever older ones may be in there."""
    key, config = next(iter(content.config_records.items()), ("config", ConfigRecord()))
    kept = {name: value for name, value in config.items() if name not in (KEY, ACK, ACKS, PLACE)}
    return RecordDict({**content, key: ConfigRecord({**kept, **told})})
