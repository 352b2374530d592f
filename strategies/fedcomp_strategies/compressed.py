"""Compressed: wraps any strategy of Flower's Message API so that clients upload frames instead of models.

``Compressed(FedAdam(...), uplink="topk(0.01)", feedback="ef")`` is all a server needs. It goes around everything else,
privacy wrappers included. Clients without fedcomp reply plainly and are averaged along.
"""

import logging
import math
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedcomp import (
    Auto,
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
    wire,
)
from fedcomp.compressor import apply
from fedcomp.device import resolve
from fedcomp.layout import Layout, Vector, check_finite, check_same_tensors
from fedcomp.monitor import Monitor, Sink
from fedcomp.request import ACK, ACKS, COMPACT, KEY, PLACE, Request, has_floats, is_ours
from fedcomp.schedule import Schedule
from fedcomp_strategies.accounts import Accounts
from fedcomp_strategies.acks import Acknowledgements
from fedcomp_strategies.aggregator import Aggregator, Mean
from fedcomp_strategies.averaging import averaged_reply, averages, metrics_of, traits_of
from fedcomp_strategies.checks import Choices
from fedcomp_strategies.delivery import Delivery
from fedcomp_strategies.downlink import Downlink
from fedcomp_strategies.evaluations import Evaluations
from fedcomp_strategies.feedback import ServerFeedback
from fedcomp_strategies.guards import MovingAverage, capped
from fedcomp_strategies.privacy import Bound
from fedcomp_strategies.rates import LEAST_BITS, choose, notes_size
from fedcomp_strategies.records import (
    Model,
    copies,
    identity,
    integers_in,
    is_finite,
    of_kind,
    to_record,
    views,
)
from fedcomp_strategies.replies import UNASKED, Reply, cause_of, triage, triage_evaluation, weight_key, weight_of
from fedcomp_strategies.rounds import Outcome, SentRound
from fedcomp_strategies.traffic import RoundTraffic, payload
from fedcomp_strategies.uplink import Uplink

log = logging.getLogger("fedcomp")


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
        budgets: budgets of nodes whose configuration (``flower-supernode --node-config``) has some value, which each of
            their uploads keeps to instead of the common one: ``{"link=nbiot": "200 B", "link=lte": "2 kB"}``, or as a
            text, "link=nbiot: 200 B, link=lte: 2 kB". Only with "auto". A node's own ``fedcomp-budget`` is never
            exceeded, whatever budget is given here.
        min_replies: how many usable replies a round needs for the model to change.
        evaluation: "messages": after each round, as the inner strategy does it. "piggyback": nodes that train evaluate
            the model that they receive, and their replies bring the metrics, so that a round costs one message a node
            instead of two. The metrics of a round's model come with the next round; the last model, under `start`, is
            evaluated by messages, and so are all where no client evaluates along. Clients say which function that is:
            `compress_mod.evaluates`.
        compact: whether frames, metrics and small models travel inside configurations, which takes fewer requests of
            the transport, to and from clients that can read that. If not, frames and models are arrays.

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
        budgets: Mapping[str, str] | str | None = None,
        min_replies: int = 1,
        evaluation: str = "messages",
        compact: bool = True,
    ) -> None:
        if hasattr(strategy, "configure_fit"):
            raise ConfigError(
                f"{type(strategy).__name__} is a strategy of Flower's legacy API: wrap it in CompressedStrategy of "
                "fedcomp_strategies.legacy"
            )
        _validate.one_of(choices=("mean", "max"), integers=integers)
        _validate.flag(mixed_fleet=mixed_fleet)
        _validate.flag(shared=shared)
        _validate.flag(compact=compact)
        _validate.one_of(choices=("messages", "piggyback"), evaluation=evaluation)
        self.strategy = strategy
        self._accounts = Accounts()
        _validate.integer(low=1, min_replies=min_replies)
        self.min_replies = min_replies
        self.monitor = monitor
        self.integers = integers
        self.device = resolve(device)
        self._bound = Bound(strategy)
        self._compact = compact
        self._evaluations = Evaluations() if evaluation == "piggyback" else None
        self._uplink = Uplink(uplink, budget, budgets, shared and averages(strategy) and monitor is None)
        self._wanted = None if feedback == "auto" else as_feedback(feedback)
        self._wanted_cap = norm_cap
        self._feedback = ServerFeedback(self._wanted or NoFeedback(), seed)
        packer = None if downlink == "plain" else Downlink(None if downlink == "pack" else downlink, seed)
        self._delivery = Delivery(packer, mixed=mixed_fleet, compact=compact)
        norm_cap = None if norm_cap == "auto" else norm_cap
        self._norm_cap = None if norm_cap is None else _validate.number(low=0, high=1e6, above=True, norm_cap=norm_cap)
        self._moving = MovingAverage(average) if _validate.number(low=0, high=0.999, average=average) else None
        measured = norm_cap is not None and averages(strategy)
        self._request = Request(self._uplink.plan(1), 0, self._feedback.feedback, seed, _new_session(), measured)
        self._check()
        self._reports_later = False  # the line about a round, because the server evaluates too
        self._exact: set[str] = set()  # names of integers: Flower makes floats of them, from one training to the next
        self._forget_training()

    def _check(self) -> None:
        """Refuse what cannot work before the run, and say what will not work well."""
        if isinstance(self.strategy, Compressed):
            raise ConfigError(f"{type(self.strategy).__name__} compresses already: wrap Flower's own strategy, once")
        if self._uplink.has_node_budgets and not self._compact:
            raise ConfigError("budgets of nodes need compact replies, which compact=False rules out")
        if self._evaluations is not None and not self._compact:
            raise ConfigError("evaluation='piggyback' needs compact replies, which compact=False rules out")
        if self._evaluations is not None and self._moving is not None:
            raise ConfigError(
                "evaluation='piggyback' is of the model that is trained, average of another one; give up one of the two"
            )
        Choices(
            self.strategy,
            self._uplink.plans(),
            self._feedback.feedback,
            needs_mean=self._feedback.needs_mean,
            monitored=self.monitor is not None,
            capped=self._norm_cap is not None,
            packs=self._delivery.downlink is not None,
            coding_chosen=self._uplink.left_open,
            feedback_chosen=self._uplink.left_open and self._wanted is None,
        ).check()

    def _forget_training(self) -> None:
        """Begin as if nothing had been sent or received before."""
        self._acks = Acknowledgements()
        self._begun = False
        self._monitors: dict[int, Monitor] = {}
        self._round: SentRound | None = None
        self._trained: Layout | None = None  # of the model that the training began with: strategies widen dtypes later
        self._uncapped_told = False
        self._feedback.restart()
        self._uplink.restart()
        self._delivery.restart()
        self._accounts.restart()
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
    def traffic(self) -> list[RoundTraffic]:
        """One RoundTraffic a train round."""
        return self._accounts.rounds

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
        """Flower's own, except that with `average` evaluate_fn is given the moving average, and the result holds it.

        Evaluations that came with training are in the result under the round whose model they are of; 0: the initial.
        """
        if self._moving is not None:
            self._moving.restart()  # or the start would be evaluated as the end of the training before
        if self._evaluations is not None:
            self._evaluations.begin(num_rounds, evaluate_config)

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            assert evaluate_fn is not None
            metrics = evaluate_fn(server_round, arrays if self.averaged is None else self.averaged)
            if server_round:
                self.report(server_round, metrics)
            return metrics

        given = None if evaluate_fn is None else evaluate
        self._reports_later = given is not None
        result = super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, given)
        if self.averaged is not None:
            result.arrays = self.averaged
        if self._evaluations is not None:
            told = {**self._evaluations.metrics, **result.evaluate_metrics_clientapp}
            result.evaluate_metrics_clientapp = dict(sorted(told.items()))
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
            self._exact |= integers_in(arrays)
            self._settle(arrays, len(messages))
            self._begun = True
        plan = self._announced(self._feedback.feedback.plan(self._uplink.plan(server_round), server_round))
        self._request = replace(self._request, round=server_round, plan=plan, feedback=self._feedback.feedback)
        asked = Counter(message.metadata.dst_node_id for message in messages)
        self._round = SentRound(arrays, asked)
        told = self._tell_acks(grid, set(asked))
        models, request = self._models(messages), self._request.to_text()
        placed = isinstance(plan.codec, Auto) and plan.codec.unbiased
        common = {KEY: request, **({COMPACT: True} if self._compact else {}), **self._uplink.told(plan)}
        if self._evaluations is not None:
            common |= self._evaluations.asked(server_round)
        for index, message in enumerate(messages):
            records = list(of_kind(message.content, ArrayRecord).values())
            node = message.metadata.dst_node_id
            # Two replies of one node could not be told apart: such nodes reply plainly.
            if len(records) == 1 and asked[node] == 1 and identity(records[0]) in models:
                self._round.sent[node] = records[0]
                place = {PLACE: index / len(messages)} if placed else {}
                message.content = _with_config(message.content, {**common, **place, **told.get(node, {})})
        predictor = self._feedback.predictor_frame
        self._delivery.pack(messages, models, self._round, server_round, predictor=predictor)
        self._round.note(messages)
        self._accounts.begin(server_round, messages)
        return messages

    def _settle(self, arrays: ArrayRecord, clients: int) -> None:
        """Choose what was left to "auto", now that the model is known. Raises ConfigError if it cannot work."""
        self._trained = _layout_of(arrays)
        layout = self._trained
        if layout is None:
            return None
        if not self._uplink.left_open:
            return self._uplink.check_budgets(layout, self._notes)
        bits, predictors = self._uplink.bits(layout), self._delivery.downlink is not None
        choice = choose(layout, bits, clients, self.strategy, self._wanted, predictors=predictors)
        self._uplink.choose(choice.unbiased)
        if self._wanted is None:
            self._feedback = ServerFeedback(choice.feedback, self._request.seed)
        if self._wanted_cap == "auto":
            self._norm_cap = choice.norm_cap
        measured = self._norm_cap is not None and averages(self.strategy)
        self._request = replace(self._request, norm=measured)
        log.info(
            "auto: %s coding in %.3g bits per parameter, %s, feedback %s, norm cap %s: %s",
            "unbiased" if choice.unbiased else "biased", bits, "shared by weight" if self._uplink.shared else "each",
            self._feedback.feedback, self._norm_cap, choice.reason,
        )  # fmt: skip
        if bits < LEAST_BITS:
            log.warning(
                "auto: %.3g bits per parameter are below %g, where accuracy is lost whatever the setting; "
                "`fedcomp advise` shows what larger budgets bring", bits, LEAST_BITS,
            )  # fmt: skip
        self._check()
        return self._uplink.check_budgets(layout, self._notes)

    @property
    def _notes(self) -> int:
        """Bytes of a frame that hang on what is asked for besides the plan."""
        return notes_size(self._request.norm, self._feedback.feedback)

    def _announced(self, plan: Plan) -> Plan:
        """The plan with the step that this round's clients code at. Raises BudgetError if the budget is too small."""
        told = self._uplink.shares(plan) and self._trained is not None
        self._request = replace(self._request, weight=weight_key(self.strategy) or "" if told else "")
        return plan if self._trained is None else self._uplink.announced(plan, self._trained, self._notes)

    def _models(self, messages: list[Message]) -> set[Any]:
        """Which records in the messages, by identity, are models of dtypes that frames can be about.

        Others pass through as they are. Messages usually share one record, which is looked at once.
        """
        records = {identity(record): record for m in messages for record in of_kind(m.content, ArrayRecord).values()}
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

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The inner strategy's evaluate messages, with the model packed as for training.

        The moving average, where there is one, is always sent whole: nodes go on holding the model that is trained.
        With evaluation="piggyback" there are none before the last round, if clients have evaluated along with training.
        """
        if self._evaluations is not None and self._evaluations.comes_along(server_round):
            self._round = None
            return []
        averaged = self.averaged
        arrays = arrays if averaged is None else averaged
        messages = list(self.strategy.configure_evaluate(server_round, arrays, config, grid))
        self._round = SentRound(arrays)
        models = self._models(messages)
        self._delivery.pack(messages, models, self._round, server_round, whole=averaged is not None)
        if messages:
            self._round.note(messages)
            self._accounts.count(server_round, bytes_down_evaluate=payload(messages))
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
        sent, self._round = self._round or SentRound(ArrayRecord()), None
        replies = list(replies)
        key = weight_key(self.strategy)
        opened = triage(replies, sent.asked, server_round, key, sent.addressees)
        if self._takes_mean(sent, opened):
            outcome = self._average(server_round, opened, sent, str(key))
        else:
            outcome = self._hand_over(server_round, opened, sent, key)
        used = {r.node: r.notes for r in outcome.replies if r.node in outcome.counted and r.notes is not None}
        for node in sent.asked.keys() - {reply.node for reply in outcome.replies if not reply.cause}:
            self._acks.miss(node)
        self._delivery.confirm(outcome.replies, sent)
        self._evaluate(server_round - 1, outcome.replies)
        good = {r.node: r for r in outcome.replies if r.node in used and r.array is not None and not r.own_budget}
        self._uplink.observe(
            self._feedback.feedback.plan(self._uplink.plan(server_round), server_round),
            [len(reply.array.data) for reply in good.values() if reply.array is not None],
            {node: outcome.levels[node] for node in good if node in outcome.levels},
            {node: weight_of(reply.message, key) for node, reply in good.items()},
        )
        traffic = self._accounts.complete(server_round, outcome.replies, sent, used.values())
        if traffic.uploads and not self._uplink.shares(self._request.plan):
            parameters = sum(math.prod(array.shape) for array in sent.arrays.values())
            self._feedback.warn_of_starvation(8 * traffic.bytes_up / traffic.uploads / max(parameters, 1))
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
        return arrays, self._accounts.with_dropped(outcome.metrics)

    def _takes_mean(self, sent: SentRound, replies: list[Reply]) -> bool:
        """Whether the inner strategy can be given the mean.

        So it is if it averages, all replies are about one model of floats, and no monitor wants to see each of them.
        """
        models = [sent.sent.get(reply.node) for reply in replies if not reply.cause]
        if not models or models[0] is None or self.monitor is not None or not averages(self.strategy):
            return False
        known = identity(models[0])
        return has_floats(models[0]) and all(model is not None and identity(model) == known for model in models)

    def _average(self, server_round: int, replies: list[Reply], sent: SentRound, key: str) -> Outcome:
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
            return Outcome(opened)
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
        return Outcome(opened, arrays, metrics, update, counted, levels)

    def _capped(self, server_round: int, mean: Mean, aggregator: Aggregator, weights: Mapping[int, float]) -> Mean:
        """The mean with its update no longer than the norm cap allows."""
        step = capped(mean.update, aggregator.norms(mean), weights, self._norm_cap or 0)
        if step.factor < 1:
            log.info(
                "round %d: mean update of length %.4g, scaled down to the norm cap of %.4g",
                server_round, step.length, step.most,
            )  # fmt: skip
            self._accounts.count(server_round, capped=step.factor)
        return replace(mean, update=step.update)

    def _collect(self, reply: Reply, aggregator: Aggregator, sent: SentRound, weights: Mapping[int, float]) -> Reply:
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

    def _hand_over(self, server_round: int, replies: list[Reply], sent: SentRound, key: str | None) -> Outcome:
        """Hand the inner strategy every client's model."""
        if self._feedback.needs_mean and any(not reply.cause for reply in replies):
            log.error(
                "round %d: feedback %s needs the mean of updates of one model, but nodes were sent different ones; the "
                "old model stays", server_round, self._request.feedback,
            )  # fmt: skip
            return Outcome(replies)
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
            if errors := _errors(opened):  # privacy wrappers divide by how many there are
                self.strategy.aggregate_train(server_round, errors)
            return Outcome(opened)
        messages = [reply.message for reply in opened if reply.cause not in UNASKED]
        arrays, metrics = self.strategy.aggregate_train(server_round, messages)
        counted = {r.node for r in opened if not r.cause} if traits_of(self.strategy).ignores_weights else heavy
        return Outcome(opened, arrays, metrics, counted=counted)

    def _with_weight(self, reply: Reply, key: str | None) -> Reply:
        """The reply, refused if it weighs nothing: the strategy might pick it alone, and divide by zero."""
        if reply.cause or key is None or weight_of(reply.message, key):
            return reply
        return reply.refused(
            "weight", f"expected the metric {key!r} above 0 with {traits_of(self.strategy).name}, got 0"
        )

    def _open(self, reply: Reply, sent: SentRound) -> Reply:
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

    def _decode(self, reply: Reply, sent: SentRound) -> Model:
        base = sent.base(reply.node)
        contents = wire.unpack(reply.frame(), Layout.of(base), plan=self._request.plan, round=self._request.round)
        model = apply(contents, self._feedback.shifted(base) if contents.notes.predicted else base)
        model = sent.corrected(reply.node, model, contents.verbatim)
        if self.monitor is not None:
            node = self._monitors.setdefault(reply.node, Monitor(self.monitor))
            node.observe(self._request.round, base, model)
        return model

    def _plain(self, reply: Reply, sent: SentRound) -> Model:
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
        elif len(heavy) < self.min_replies:
            log.error(
                "round %d: %d usable replies are fewer than min_replies=%d, the old model stays",
                server_round, len(heavy), self.min_replies,
            )  # fmt: skip
        else:
            return True
        return False

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The inner strategy's evaluation, without replies that are inconsistent or have an impossible weight."""
        sent, self._round = self._round or SentRound(ArrayRecord()), None
        replies = list(replies)
        silent = self._evaluations is not None and not replies  # nobody was asked
        checked = triage_evaluation(replies, weight_key(self.strategy))
        self._delivery.confirm(checked, sent)
        self._accounts.add_evaluation(server_round, checked, sent)
        metrics = None if silent else self._aggregate_evaluations(server_round, checked)
        if not self._reports_later:
            self.report(server_round, metrics)
        return metrics

    def _evaluate(self, server_round: int, replies: list[Reply]) -> None:
        """Take in what replies to train messages say of the model that they were sent."""
        said = [r.evaluation for r in replies if r.evaluation is not None and not r.cause]
        if self._evaluations is None:
            return
        self._evaluations.heard = bool(said)
        if not said:
            return
        checked = triage_evaluation(said, weight_key(self.strategy))
        metrics = self._aggregate_evaluations(server_round, checked)
        if metrics is not None:
            self._evaluations.metrics[server_round] = metrics

    def _aggregate_evaluations(self, server_round: int, checked: list[Reply]) -> MetricRecord | None:
        key = weight_key(self.strategy)
        good = [reply.message for reply in checked if not reply.cause]
        if key is not None and good and not any(weight_of(message, key) for message in good):
            log.warning("round %d: all evaluations have weight zero and are left out", server_round)
            checked = [reply for reply in checked if reply.cause]
        return self.strategy.aggregate_evaluate(server_round, [reply.message for reply in checked])

    # --- what a round leaves behind ----------------------------------------------------------------------------------

    def report(self, server_round: int, metrics: MetricRecord | None) -> None:
        """Log the line about a round, where Flower logs what it does."""
        of_round = server_round
        if metrics is None and self._evaluations is not None and self._evaluations.metrics:
            of_round, metrics = list(self._evaluations.metrics.items())[-1]
        self._accounts.report(server_round, metrics, of_round)

    def _learn(self, before: ArrayRecord, arrays: ArrayRecord, update: Mapping[str, Vector] | None) -> None:
        """Let feedback, and codecs with shared side information, look at what has happened to the global model."""
        round_ = self._request.round
        adapts = self._uplink.learns(round_)
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
            buckets = self._uplink.plan(round_).buckets(Layout.of(new))
            coded = [t.name for b in buckets for t in b.layout.tensors if t.name in moved]
            seen = update if update is not None else {name: moved[name] for name in coded} if finite else None
            self._feedback.learn(seen, new, round_)
        if adapts and finite:
            self._uplink.learn(round_, {name: moved[name] for name in new if name in moved}, self._request.seed)


def _layout_of(arrays: ArrayRecord) -> Layout | None:
    """The layout of a model; None if frames cannot be about it."""
    try:
        return Layout.of(views(arrays)) if has_floats(arrays) else None
    except LayoutError:
        return None


def _new_session() -> str:
    return secrets.token_hex(4)


def _errors(replies: list[Reply]) -> list[Message]:
    return [reply.message for reply in replies if reply.cause and reply.cause not in UNASKED]


def _with_config(content: RecordDict, told: dict[str, Any]) -> RecordDict:
    """The content with these entries in its configuration, whatever older ones may be in there."""
    key, config = next(iter(of_kind(content, ConfigRecord).items()), ("config", ConfigRecord()))
    kept = {name: value for name, value in config.items() if not is_ours(name)}
    return RecordDict({**content, key: ConfigRecord({**kept, **told})})
