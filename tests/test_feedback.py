"""Feedback without Flower: the laws of each scheme, its memory, and how it is written."""

import logging
import pickle
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import fedcomp
from fedcomp import (
    DGC,
    ECSQ,
    EF21,
    CAFe,
    ConfigError,
    CountSketch,
    ErrorFeedback,
    Feedback,
    FetchSGD,
    FrameError,
    Identity,
    Layout,
    Memory,
    NoFeedback,
    Plan,
    Rule,
    Sign,
    Tensor,
    TopK,
    Uniform,
    as_feedback,
    compress,
    decompress,
    generator,
    wire,
)
from fedcomp.codecs.sketch import sketch
from fedcomp.feedback import EMPTY, CAFeGuard, EF21Server, FetchSGDServer, feedbacks
from fedcomp.feedback.stored import PRECISIONS, memory_layout, pack_memory, unpack_memory
from fedcomp.metrics import length

LAYOUT = Layout((Tensor("a", (20, 30)), Tensor("b", (40,))))
ZERO = {t.name: np.zeros(t.shape, np.float32) for t in LAYOUT.tensors}
SPARSE = Plan(TopK(0.05, values=Uniform(8)), gentle_share=0)


def updates(count: int, seed: int = 0) -> list[dict[str, NDArray[Any]]]:
    """Updates with a common direction, so that residuals matter."""
    random = np.random.default_rng(seed)
    common = {t.name: random.standard_normal(t.shape) for t in LAYOUT.tensors}
    return [
        {n: (c + random.standard_normal(c.shape)).astype(np.float32) for n, c in common.items()} for _ in range(count)
    ]


def total(arrays: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {n: np.asarray(np.sum([a[n] for a in arrays], axis=0, dtype=np.float64)) for n in ZERO}


def send(new: Any, plan: Plan, round_: int, feedback: Feedback, **options: Any) -> fedcomp.CompressedUpdate:
    return compress(ZERO, new, plan, round=round_, rng=generator(0, round_, 0), feedback=feedback, **options)


# --- error feedback and DGC ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan", [SPARSE, Plan(Sign()), Plan(ECSQ(bits=0.1)), Plan(TopK(0.01))], ids=lambda p: str(p.codec)
)
def test_what_was_used_plus_the_memory_that_counts_is_the_sum_of_the_updates(plan: Plan) -> None:
    """50 rounds of which a third are lost: their updates and memories never happened (c29, c30)."""
    random = np.random.default_rng(7)
    memory, used, sent = EMPTY, [], []
    for round_, update in enumerate(updates(50), 1):
        done = send(update, plan, round_, ErrorFeedback(), memory=memory)
        if random.random() < 1 / 3:
            continue
        memory = done.memory
        used.append(update)
        sent.append(decompress(done.frame, ZERO))
    left = memory.slots["residual"]
    assert 20 < len(used) < 45
    for name, expected in total(used).items():
        assert np.allclose(total(sent)[name] + left[name], expected, atol=1e-3 * np.abs(expected).max())
        assert np.abs(left[name]).max() > 0


ONE_VERBATIM = Plan(TopK(0.05, values=Uniform(8)), (Rule("b", None),), gentle_share=0)
ALL_VERBATIM = Plan(TopK(0.05), (Rule("*", None),))


def test_what_is_remembered_of_tensors_that_travel_verbatim_stays_as_it_is() -> None:
    """B11: 30 rounds in which tensors leave their bucket and come back; the law of the test above holds in each."""
    plans = [SPARSE, ONE_VERBATIM, Plan(Sign()), ALL_VERBATIM, SPARSE]
    memory, given, sent = EMPTY, [], []
    for round_, update in enumerate(updates(30), 1):
        plan = plans[(round_ - 1) % len(plans)]
        done = send(update, plan, round_, ErrorFeedback(max_norm=8), memory=memory)
        given.append(update)
        sent.append(decompress(done.frame, ZERO))
        for name, expected in total(given).items():
            left = done.memory.slots["residual"].get(name, ZERO[name])
            assert np.allclose(total(sent)[name] + left, expected, atol=1e-3 * np.abs(expected).max()), (round_, name)
        for tensor in plan.verbatim(LAYOUT):
            before = memory.slots["residual"][tensor.name]
            assert np.array_equal(done.memory.slots["residual"][tensor.name], before)
            assert before.any()
        assert not done.notes.shortened
        memory = done.memory


@pytest.mark.parametrize("feedback", [DGC(momentum=0.5), EF21()], ids=str)
def test_every_slot_of_a_tensor_that_travels_verbatim_stays(feedback: Feedback) -> None:
    """The server's half of EF21 keeps its estimate too."""
    given = updates(3)
    first = send(given[0], Plan(Sign()), 1, feedback)
    second = send(given[1], ONE_VERBATIM, 2, feedback, memory=first.memory)
    for slot in feedback.slots:
        assert np.array_equal(second.memory.slots[slot]["b"], first.memory.slots[slot]["b"])
        assert not np.array_equal(second.memory.slots[slot]["a"], first.memory.slots[slot]["a"])


def test_memories_that_do_not_fit_and_lost_ones_are_not_carried_over(caplog: pytest.LogCaptureFixture) -> None:
    misfit = {"b": np.ones(3, np.float32), "a": np.full((20, 30), np.inf, np.float32), "gone": np.ones(2, np.float32)}
    done = send(updates(1)[0], ALL_VERBATIM, 2, ErrorFeedback(), memory=Memory(1, {"residual": misfit}))
    assert not any(values.any() for values in done.memory.slots["residual"].values())
    assert set(done.memory.slots["residual"]) <= set(ZERO)
    assert all(f"residual of tensor {name!r} dropped" in caplog.text for name in "ab")
    old = Memory(1, {"residual": {"b": np.ones(40, np.float32)}})
    for memory, feedback in ((None, ErrorFeedback()), (old, ErrorFeedback(max_age=1))):
        done = send(updates(1)[0], ALL_VERBATIM, 5, feedback, memory=memory)
        assert not done.memory.slots["residual"]
    done = send(updates(1)[0], ALL_VERBATIM, 5, NoFeedback(), memory=old)
    assert not done.memory.slots


def test_dgc_sends_what_its_momentum_adds_up_to() -> None:
    """Sum of what was sent + v = sum of u after each momentum step."""
    feedback, codec = DGC(momentum=0.7), TopK(0.1)
    slots = {"residual": np.zeros(640, np.float32), "momentum": np.zeros(640, np.float32)}
    sent, moved = np.zeros(640), np.zeros(640)
    for step in range(30):
        x = np.random.default_rng(step).standard_normal(640, np.float32)
        moved += np.float32(0.7) * slots["momentum"] + x
        parts, slots = feedback.encode(codec, x, LAYOUT, slots, np.random.default_rng(0))
        decoded = codec.decode(parts, LAYOUT)
        sent += decoded
        assert not slots["momentum"][decoded != 0].any()  # factor masking
    assert np.allclose(sent + slots["residual"], moved, atol=1e-3)


def test_dgc_that_sends_everything_is_sgd_without_momentum_and_one_that_sends_nothing_adds_up() -> None:
    x = np.random.default_rng(0).standard_normal(640, np.float32)
    slots = {"residual": np.zeros(640, np.float32), "momentum": np.zeros(640, np.float32)}
    for _ in range(3):
        parts, slots = DGC().encode(Identity(), x, LAYOUT, slots, np.random.default_rng(0))
        assert np.array_equal(Identity().decode(parts, LAYOUT), x)
        assert not slots["residual"].any()
        assert not slots["momentum"].any()


def test_dgc_warms_up_the_sparsity() -> None:
    plan = Plan(TopK(0.001), (Rule("b", TopK(0.5)), Rule("c", Sign())))
    fractions = [DGC(warm_up=2).plan(plan, round_).codec for round_ in range(1, 13)]
    assert [c.fraction for c in fractions if isinstance(c, TopK)] == [
        0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.00390625, 0.00390625, 0.001, 0.001, 0.001, 0.001,
    ]  # fmt: skip
    assert DGC().plan(plan, 1).rules == plan.rules
    assert DGC(warm_up=0).plan(plan, 1) == plan
    assert ErrorFeedback().plan(plan, 1) == plan


def test_a_client_away_for_100_rounds_comes_back_with_its_residual() -> None:
    given = updates(2)
    first = send(given[0], SPARSE, 1, ErrorFeedback())
    for feedback, factor in ((ErrorFeedback(), 1.0), (ErrorFeedback(decay=0.99), 0.99**99)):
        second = send(ZERO, Plan(Identity()), 101, feedback, memory=first.memory)
        back = decompress(second.frame, ZERO)
        assert np.allclose(back["a"], factor * first.memory.slots["residual"]["a"], atol=1e-6)
        assert not second.notes.reset


def test_a_residual_that_is_too_old_or_lost_counts_as_none_and_the_frame_says_so() -> None:
    given = updates(2)
    first = send(given[0], SPARSE, 1, ErrorFeedback())
    fresh = send(given[1], SPARSE, 12, ErrorFeedback())
    for memory, feedback in ((first.memory, ErrorFeedback(max_age=10)), (None, ErrorFeedback())):
        again = send(given[1], SPARSE, 12, feedback, memory=memory)
        seen = wire.peek(again.frame)
        assert seen is not None
        assert seen[1].reset
        assert np.array_equal(decompress(again.frame, ZERO)["a"], decompress(fresh.frame, ZERO)["a"])
    young = send(given[1], SPARSE, 11, ErrorFeedback(max_age=10), memory=first.memory)
    assert not young.notes.reset


def test_a_residual_that_is_too_long_is_shortened_and_the_frame_says_so() -> None:
    memory, shortened = EMPTY, []
    for round_, update in enumerate(updates(30), 1):
        done = send(update, SPARSE, round_, ErrorFeedback(max_norm=2), memory=memory)
        memory = done.memory
        shortened.append(done.notes.shortened)
        seen = wire.peek(done.frame)
        assert seen is not None
        assert seen[1].shortened == done.notes.shortened
        assert done.residual_ratio <= 2.0001
    assert not shortened[0]
    assert shortened[-1]


@pytest.mark.parametrize("feedback", [ErrorFeedback(max_norm=2), DGC(max_norm=2)], ids=str)
def test_an_update_of_length_zero_shortens_nothing(feedback: Feedback) -> None:
    """C3: a client that found nothing to train on once kept nothing of what it owed."""
    first = send(updates(1)[0], SPARSE, 6, feedback)
    still = send(ZERO, SPARSE, 7, feedback, memory=first.memory)
    assert not still.notes.shortened
    assert still.residual_ratio == 0
    sent = decompress(still.frame, ZERO)
    for name in ZERO:
        former = {slot: values[name] for slot, values in first.memory.slots.items()}
        owed = former["residual"] + np.float32(0.9) * former.get("momentum", np.float32(0))
        assert np.allclose(sent[name] + still.memory.slots["residual"][name], owed, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e-15, 1.0, 1e15, 1e30, 1e36])
def test_lengths_are_right_over_the_whole_range_of_float32(scale: float) -> None:
    """C3: squares leave it at 1e-23 and 1e19, after which nothing, or everything, was too long."""
    given, ratios, shortened = updates(12), [], []
    memory = EMPTY
    for round_, update in enumerate(given, 1):
        scaled = {name: values * np.float32(scale) for name, values in update.items()}
        done = send(scaled, Plan(TopK(0.05), gentle_share=0), round_, ErrorFeedback(max_norm=2), memory=memory)
        memory = done.memory
        assert done.norm == pytest.approx(scale * length(update.values()), rel=0.01)
        ratios.append(done.residual_ratio)
        shortened.append(done.notes.shortened)
    assert max(ratios) == pytest.approx(2, rel=0.01)
    assert not any(shortened[:2])
    assert shortened[-1]


def test_lengths_of_odd_arrays() -> None:
    assert length([]) == length([np.zeros(0, np.float32), np.zeros((3, 4))]) == 0
    assert length([np.array(-3.0), np.full((2, 2), 2, np.float32).T]) == 5
    assert length([np.array([1e200, -1e200])]) == pytest.approx(2**0.5 * 1e200)
    assert length([np.array([1.0, -np.inf])]) == np.inf
    assert np.isnan(length([np.array([1.0, np.nan])]))


@pytest.mark.parametrize("feedback", [ErrorFeedback(), DGC(), EF21()], ids=str)
def test_codecs_that_would_diverge_are_refused(feedback: Feedback) -> None:
    for plan in (Plan(Uniform(2, rounding="stochastic")), Plan(Sign(), (Rule("b", CountSketch(columns=5)),))):
        with pytest.raises(ConfigError, match="not contractive"):
            feedback.check(plan)
        with pytest.raises(ConfigError, match="not contractive"):
            send(updates(1)[0], plan, 1, feedback)


# --- EF21 ------------------------------------------------------------------------------------------------------------


def test_ef21_learns_updates_that_stay_the_same() -> None:
    """With half of the clients in each round the step becomes the weighted mean of all clients' updates."""
    given = {node: updates(1, seed=node)[0] for node in range(4)}
    weights = {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}
    expected = {n: sum(weights[node] * given[node][n] for node in given) / 10 for n in ZERO}
    server, memories = EF21Server(), dict.fromkeys(given, EMPTY)
    step: dict[str, NDArray[Any]] = {}
    for round_ in range(1, 160):
        cohort = [node for node in given if (node + round_) % 2]
        sent = {}
        for node in cohort:
            done = send(given[node], SPARSE, round_, EF21(), memory=memories[node])
            memories[node] = done.memory
            sent[node] = decompress(done.frame, ZERO)
        here = {node: weights[node] for node in cohort}
        mean = {
            n: np.asarray(sum(w * sent[node][n] for node, w in here.items()) / sum(here.values()), np.float32)
            for n in ZERO
        }
        step = server.step(mean, here)
        server.commit()
    for name, values in expected.items():
        assert np.allclose(step[name], values, atol=0.02 * np.abs(values).max())


# --- CAFe ------------------------------------------------------------------------------------------------------------


def test_cafe_takes_off_beta_times_the_predictor() -> None:
    update, predictor = updates(2)
    done = send(update, Plan(Identity()), 3, CAFe(beta=0.5), predictor=predictor)
    assert done.notes.predicted
    sent = decompress(done.frame, ZERO)
    for name, values in update.items():
        assert np.allclose(sent[name] + np.float32(0.5) * predictor[name], values, atol=1e-6)
    plain = send(update, Plan(Identity()), 3, CAFe(beta=0.5))
    assert not plain.notes.predicted
    assert np.array_equal(decompress(plain.frame, ZERO)["a"], update["a"])


def test_cafe_refuses_a_predictor_of_another_model() -> None:
    with pytest.raises(fedcomp.LayoutError, match="predictor: tensor 'b'"):
        send(updates(1)[0], SPARSE, 3, CAFe(), predictor={"a": ZERO["a"]})


def test_the_guard_lowers_beta_when_updates_grow_again() -> None:
    guard = CAFeGuard(0.9)
    calm = [guard.observe(1 / (1 + step), 10.0) for step in range(20)]
    assert not any(calm)
    growing = [guard.observe(0.05 * 1.4**step, 10.0) for step in range(12)]
    assert any("mean updates have grown" in reason for reason in growing)
    assert guard.beta < 0.9


def test_the_guard_lowers_beta_when_weights_run_away() -> None:
    """What nobody ever picks up is re-applied for ever at beta = 1: the same step again and again."""
    guard = CAFeGuard(1.0)
    said = [guard.observe(1.0, 3.0 + step**1.5) for step in range(40)]
    assert any("weights' norm" in reason for reason in said)
    assert guard.beta < 0.95


def test_the_guard_leaves_ordinary_training_alone() -> None:
    random = np.random.default_rng(0)
    guard = CAFeGuard(0.9)
    said = [
        guard.observe(float(random.uniform(0.6, 1.4) * (0.3 + 1 / (1 + step))), 10 + 0.1 * step) for step in range(300)
    ]
    assert not any(said)
    assert "not finite" in guard.observe(float("nan"), 1.0)


# --- FetchSGD --------------------------------------------------------------------------------------------------------


def test_fetchsgd_keeps_what_it_did_not_apply() -> None:
    """S_e + sum of S(step) = eta sum of S_u."""
    codec = CountSketch(rows=5, columns=60, seed=3)
    server = FetchSGDServer(FetchSGD(momentum=0.5, lr=0.4, fraction=0.05), codec)
    momentum, expected, applied = np.zeros((5, 60)), np.zeros((5, 60)), np.zeros(640, np.float32)
    for step in range(20):
        mean = sketch(np.random.default_rng(step).standard_normal(640, np.float32), 5, 60, 3)
        momentum = 0.5 * momentum + mean
        expected += 0.4 * momentum
        applied += server.step(mean, 640)
        server.commit()
    assert np.allclose(server.error + sketch(applied, 5, 60, 3), expected, atol=1e-3)


def test_fetchsgd_in_a_wide_table_is_momentum_and_error_feedback_with_top_k() -> None:
    codec = CountSketch(rows=7, columns=1280, seed=3)
    feedback = FetchSGD(momentum=0.9, lr=0.1, fraction=0.05)
    server = FetchSGDServer(feedback, codec)
    momentum, error = np.zeros(640, np.float32), np.zeros(640, np.float32)
    for step in range(6):
        x = np.zeros(640, np.float32)
        x[np.random.default_rng(step).integers(0, 640, 8)] = np.linspace(1, 2, 8)
        momentum = np.float32(0.9) * momentum + x
        error += np.float32(0.1) * momentum
        kept = np.argsort(-np.abs(error), kind="stable")[:32]
        expected = np.zeros(640, np.float32)
        expected[kept] = error[kept]
        got = server.step(sketch(x, 7, 1280, 3), 640)
        server.commit()
        assert np.allclose(got, expected, atol=1e-5)
        error -= expected


def test_steps_that_were_not_taken_never_happened() -> None:
    """A round whose model is refused is not acknowledged: neither side may remember it."""
    codec = CountSketch(rows=5, columns=200, seed=3)
    fetch = [FetchSGDServer(FetchSGD(momentum=0.5, fraction=0.1), codec) for _ in range(2)]
    ef21 = [EF21Server() for _ in range(2)]
    for step in range(4):
        table = sketch(np.random.default_rng(step).standard_normal(640, np.float32), 5, 200, 3)
        mean = {"a": np.full(3, step, np.float32)}
        steps = [
            (f.step(table, 640).tolist(), e.step(mean, {step: 2.0})["a"].tolist())
            for f, e in zip(fetch, ef21, strict=True)
        ]
        assert steps[0] == steps[1]
        fetch[1].step(np.ones((5, 200)), 640)  # refused
        ef21[1].step({"a": np.ones(3, np.float32)}, {9: 5.0})
        fetch[1].step(table, 640)
        ef21[1].step(mean, {step: 2.0})
        for one, other in zip(fetch, ef21, strict=True):
            one.commit()
            other.commit()


def test_ef21_goes_on_with_a_clients_first_weight() -> None:
    server = EF21Server()
    assert server.weight("c", 10.0) == 10.0
    server.step({"a": np.ones(2, np.float32)}, {"c": 10.0})
    assert server.weight("c", 99.0) == 99.0
    server.commit()
    assert server.weight("c", 99.0) == 10.0


def test_fetchsgd_does_not_apply_noise() -> None:
    """A table far too small for a dense update: the step would lengthen the error, so it is shortened."""
    codec = CountSketch(rows=5, columns=16, seed=3)
    server = FetchSGDServer(FetchSGD(momentum=0.9, lr=0.3, fraction=0.5), codec)
    total = np.zeros(640, np.float32)
    for step in range(60):
        total += server.step(sketch(np.random.default_rng(step).standard_normal(640, np.float32), 5, 16, 3), 640)
        server.commit()
        assert np.linalg.norm(total) < 1000


def test_fetchsgd_needs_sketches_that_add_up() -> None:
    for codec in (TopK(0.01), CountSketch(columns=10, seed=0)):
        with pytest.raises(ConfigError, match="sketches that add up"):
            FetchSGD().check(Plan(codec))
    FetchSGD().check(Plan(CountSketch(columns=10), (Rule("b", Uniform(8)),)))


# --- memory on disk --------------------------------------------------------------------------------------------------


def remembered(round_: int = 5, scale: float = 1e-3) -> Memory:
    random = np.random.default_rng(0)
    slots = {
        slot: {t.name: (scale * random.standard_normal(t.shape)).astype(np.float32) for t in LAYOUT.tensors}
        for slot in ("residual", "momentum")
    }
    return Memory(round_, slots)


@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1e-3, 1.0, 1e30])
@pytest.mark.parametrize(("precision", "error"), [("float32", 0), ("float16", 5e-4), ("int8", 6e-3)])
def test_stored_memories_come_back(precision: str, error: float, scale: float) -> None:
    memory = remembered(scale=scale)
    data = pack_memory(memory, LAYOUT, precision)
    back = unpack_memory(data, LAYOUT)
    assert back.round == 5
    for slot, tensors in memory.slots.items():
        for name, values in tensors.items():
            got = back.slots[slot][name]
            assert got.dtype == np.float32
            assert got.shape == values.shape
            assert np.abs(got - values).max() <= error * np.abs(values).max()
    assert len(data) < {"float32": 4.2, "float16": 2.2, "int8": 1.2}[precision] * 2 * LAYOUT.size + 200


def test_memory_of_tensors_without_any_is_zero_and_small() -> None:
    memory = Memory(2, {"residual": {"b": np.ones(40, np.float32)}})
    data = pack_memory(memory, LAYOUT)
    assert not unpack_memory(data, LAYOUT).slots["residual"]["a"].any()
    assert unpack_memory(data, LAYOUT).slots["residual"]["b"].tolist() == [1] * 40


def test_every_damage_to_a_stored_memory_is_seen() -> None:
    small = Layout((Tensor("a", (5,)),))
    data = pack_memory(Memory(1, {"residual": {"a": np.ones(5, np.float32)}}), small, "int8")
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            unpack_memory(bytes(damaged), small)
    for end in range(len(data)):
        with pytest.raises(FrameError):
            unpack_memory(data[:end], small)


def test_a_stored_memory_of_another_model_is_refused() -> None:
    data = pack_memory(remembered(), LAYOUT)
    with pytest.raises(FrameError, match="another model"):
        unpack_memory(data, Layout((Tensor("a", (30, 20)), Tensor("b", (40,)))))


def test_memories_do_not_hang_on_dtypes() -> None:
    """FedAvg hands out int64 counters as float64 from the second round on."""
    layout = Layout((Tensor("w", (3,), "float64"), Tensor("steps", (), "int64"), Tensor("v", (), "float16")))
    widened = layout.with_dtypes(["float32", "float64", "float32"])
    assert memory_layout(layout) == memory_layout(widened)
    assert set(PRECISIONS) == {"float32", "float16", "int8"}


# --- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "feedback",
    [
        NoFeedback(),
        ErrorFeedback(),
        ErrorFeedback(max_norm=8.0, max_age=20, decay=0.9),
        CAFe(),
        CAFe(0.8, codec=Uniform(4, block=64)),
        CAFe(1.0, force=True),
        DGC(momentum=0.5, warm_up=0),
        FetchSGD(0.5, 1.0, 0.05),
        EF21(),
    ],
    ids=str,
)
def test_feedbacks_can_be_written_down(feedback: Feedback) -> None:
    assert as_feedback(str(feedback)) == feedback
    assert as_feedback(feedback) is feedback
    assert pickle.loads(pickle.dumps(feedback)) == feedback
    assert feedback.name in feedbacks()


def test_a_positional_argument_is_the_first_field() -> None:
    assert as_feedback(" cafe(0.8) ") == CAFe(beta=0.8)


@pytest.mark.parametrize(
    "text",
    [
        "maybe", "", "ef(", "cafe(beta=1)", "cafe(1.0)", "cafe(beta=2, force=True)", "cafe(gamma=1)",
        "cafe(.8, beta=.8)", "ef(1, 2, 3, 4)", "ef(max_norm=-1)", "ef(max_age=1.5)", "ef(decay=0)", "dgc(momentum=1)",
        "dgc(warm_up=-1)",
        "fetchsgd(lr=0)", "ef21(1)", "cafe(codec=9)", "cafe(codec=zip)", "__import__('os')", "a.b()",
        "ef" * 1000, None, 3,
    ],
)  # fmt: skip
def test_mistakes_are_named(text: Any) -> None:
    with pytest.raises(ConfigError):
        as_feedback(text)


def test_beta_of_one_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"beta=1 .*diverges.*use 0.8 to 0.9, or force=True"):
        CAFe(beta=1)


def test_a_memory_with_bad_values_counts_as_zero_by_name(caplog: pytest.LogCaptureFixture) -> None:
    bad = Memory(1, {"residual": {"a": np.full((20, 30), np.nan, np.float32), "b": np.ones(40, np.float32)}})
    with caplog.at_level(logging.WARNING):
        done = send(ZERO, Plan(Identity()), 2, ErrorFeedback(), memory=bad)
    assert "residual of tensor 'a' dropped" in caplog.text
    back = decompress(done.frame, ZERO)
    assert not back["a"].any()
    assert back["b"].tolist() == [1] * 40
