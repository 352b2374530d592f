"""Auto: never over the budget, nothing left over, more bytes never worse, and the ways it chooses between."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedcomp
from fedcomp import Auto, BudgetError, CAFe, ConfigError, ErrorFeedback, Layout, Plan, Rule, Tensor, Uniform, nmse, wire
from fedcomp.codec import Upload
from fedcomp.compressor import smallest_frame
from fedcomp.layout import Vector

SHAPES = st.sampled_from(
    [(), (0,), (1,), (7,), (64,), (300,), (5, 4), (40, 30), (90, 70), (3, 200), (8, 4, 3, 3), (6, 5, 7), (16, 1, 5, 5)]
)
KINDS = ("zero", "normal", "heavy", "sparse", "constant", "low rank", "tiny", "huge")


def values(kind: str, shape: tuple[int, ...], random: np.random.Generator) -> Vector:
    """An update of a tensor, of one of KINDS."""
    x = random.standard_normal(shape)
    match kind:
        case "zero":
            x = np.zeros(shape)
        case "heavy":
            x = random.standard_t(1.2, shape)
        case "sparse":
            x = x * (random.random(shape) < 0.02)
        case "constant":
            x = np.full(shape, 0.3)
        case "low rank" if len(shape) == 2:
            x = random.standard_normal((shape[0], 1)) @ random.standard_normal((1, shape[1])) + 0.05 * x
        case "tiny":
            x = x * 1e-41
        case "huge":
            x = x * 1e36
    return np.clip(x, -3e38, 3e38).astype(np.float32)


@st.composite
def models(draw: st.DrawFn) -> dict[str, Vector]:
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=5))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    return {f"t{i}": values(draw(st.sampled_from(KINDS)), shape, random) for i, shape in enumerate(shapes)}


def upload(update: dict[str, Vector], codec: Auto, **more: Any) -> fedcomp.CompressedUpdate:
    base = {name: np.zeros(x.shape, x.dtype) for name, x in update.items()}
    return fedcomp.compress(base, update, Plan(codec), round=3, rng=fedcomp.generator(0, 3, 1), **more)


def error(update: dict[str, Vector], codec: Auto, **more: Any) -> float:
    base = {name: np.zeros(x.shape, x.dtype) for name, x in update.items()}
    back = fedcomp.decompress(upload(update, codec, **more).frame, base)
    flat = [np.concatenate([np.ravel(x[name]).astype(np.float64) for name in update]) for x in (update, back)]
    return nmse(*flat)


def trained(seed: int = 0, scale: float = 1.0) -> dict[str, Vector]:
    """An update like that of a client: layers of low rank with noise, a convolution, biases."""
    random = np.random.default_rng(seed)

    def layer(out: int, inside: int, rank: int) -> Vector:
        parts = random.standard_normal((out, rank)) * 0.5 ** np.arange(rank) @ random.standard_normal((rank, inside))
        return (scale * (parts + 0.1 * random.standard_t(3, (out, inside)))).astype(np.float32)

    return {
        "conv": 0.5 * layer(16, 200, 3).reshape(16, 8, 5, 5),
        "conv.bias": layer(16, 1, 1).ravel(),
        "hidden": layer(64, 300, 4),
        "hidden.bias": layer(64, 1, 1).ravel(),
        "output": 2 * layer(10, 64, 5),
        "output.bias": layer(10, 1, 1).ravel(),
    }


# --- the budget ------------------------------------------------------------------------------------------------------

budgets = st.integers(17, 3000)
searching = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


def keeps_to(update: dict[str, Vector], budget: int, unbiased: bool, step: float, weight: float) -> None:
    codec = Auto(f"{budget} B", unbiased=unbiased, step=step, cap=2.0)
    layout = Layout.of(update)
    try:
        frame = upload(update, codec, weight=weight, measured=unbiased).frame
    except BudgetError:
        assert smallest_frame(Plan(codec), layout) + 2 > budget
        return
    assert len(frame) <= codec.limit(layout.size)
    assert all(np.isfinite(x).all() for x in fedcomp.decompress(frame, {n: 0 * x for n, x in update.items()}).values())


@settings(max_examples=400, **searching)  # type: ignore[arg-type]
@given(
    models(), budgets, st.booleans(), st.sampled_from([0.0, 0.0, 1e-3, 1.0, 1e30]), st.sampled_from([1.0, 0.0, 300.0])
)
def test_no_upload_is_longer_than_the_budget(
    update: dict[str, Vector], budget: int, unbiased: bool, step: float, weight: float
) -> None:
    keeps_to(update, budget, unbiased, step, weight)


@pytest.mark.slow
@settings(max_examples=10_000, **searching)  # type: ignore[arg-type]
@given(
    models(), budgets, st.booleans(), st.sampled_from([0.0, 0.0, 1e-3, 1.0, 1e30]), st.sampled_from([1.0, 0.0, 300.0])
)
def test_no_upload_is_longer_than_the_budget_ten_thousand_times(
    update: dict[str, Vector], budget: int, unbiased: bool, step: float, weight: float
) -> None:
    keeps_to(update, budget, unbiased, step, weight)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("budget", [100, 205, 640, 2000, 6000, 8000, 20_000])
def test_little_is_left_over(budget: int, unbiased: bool) -> None:
    """Under 3 % or 16 bytes. (From about 12 bits a value on there is no smaller step, until float32 fits.)"""
    for seed in range(3):
        size = len(upload(trained(seed), Auto(f"{budget} B", unbiased=unbiased)).frame)
        assert budget - max(16, 0.03 * budget) <= size <= budget


def test_a_larger_budget_means_no_larger_error() -> None:
    """To a percent from one budget to the next (steps lie on a grid), strictly from one to its double."""
    update = trained(1)
    sizes = [int(60 * 2 ** (k / 4)) for k in range(36)]
    errors = [error(update, Auto(f"{size} B")) for size in sizes]
    assert all(b <= 1.01 * a for a, b in pairwise(errors))
    assert all(b < a for a, b in zip(errors, errors[4:], strict=False))
    assert errors[0] > 0.5
    assert errors[-1] < 1e-5


@pytest.mark.parametrize("unbiased", [False, True])
def test_with_room_for_float32_nothing_is_lost(unbiased: bool) -> None:
    assert error(trained(), Auto("100 kB", unbiased=unbiased)) == 0


def test_a_budget_that_is_too_small_names_the_smallest_that_works() -> None:
    random = np.random.default_rng(0).random(30, np.float32)
    update: dict[str, Any] = {**trained(), "steps": np.arange(5), "bn.running_var": random}
    for unbiased in (False, True):
        plan = Plan(Auto("50 B", unbiased=unbiased))
        smallest = smallest_frame(plan, Layout.of(update))
        with pytest.raises(BudgetError, match="budget of 50 bytes: the smallest upload for this model takes"):
            upload(update, Auto("50 B", unbiased=unbiased))
        assert len(upload(update, Auto(f"{smallest} B", unbiased=unbiased)).frame) <= smallest
    assert smallest_frame(Plan(Uniform(8)), Layout.of(update)) == 0


def test_the_rest_of_the_frame_counts() -> None:
    """Verbatim tensors, tensors of other codecs, a number, a norm."""
    update: dict[str, Any] = {**trained(), "steps": np.arange(50)}
    plan = Plan(Auto("900 B"), (Rule("*.bias", Uniform(8)),))
    base = {name: np.zeros(x.shape, x.dtype) for name, x in update.items()}
    rng = fedcomp.generator(0, 3, 1)
    frame = fedcomp.compress(base, update, plan, round=3, rng=rng, number=2**40, measured=True).frame
    assert 880 <= len(frame) <= 900
    assert np.array_equal(fedcomp.decompress(frame, base)["steps"], np.arange(50))
    several = Plan(Auto("900 B"), (Rule("*.bias", Auto("100 B")),))
    with pytest.raises(ConfigError, match="one codec with a budget"):
        fedcomp.compress(base, update, several, round=3, rng=rng)


def test_the_same_inputs_give_the_same_frame() -> None:
    for unbiased in (False, True):
        codec = Auto("500 B", unbiased=unbiased)
        assert upload(trained(), codec).frame == upload(trained(), codec).frame


def test_frames_do_not_tell_the_budget() -> None:
    a, b = (upload(trained(), Auto(text)).frame for text in ("500 B", "500.2 B"))
    assert a == b
    assert wire.inspect(a)["plan"] == {"codec": {"codec": "auto"}}


# --- feedback, steps, weights ----------------------------------------------------------------------------------------


def test_feedback_goes_around_the_biased_one_only() -> None:
    ErrorFeedback().check(Plan(Auto("1 kB")))
    CAFe().check(Plan(Auto("1 kB", unbiased=True)))
    with pytest.raises(ConfigError, match="not contractive"):
        ErrorFeedback().check(Plan(Auto("1 kB", unbiased=True)))


def test_an_announced_step_is_divided_by_the_weight() -> None:
    update, layout = trained(), Layout.of(trained())
    plan = Plan(Auto("2 kB", step=3.0))
    (bucket,) = plan.buckets(layout)
    for weight in (1.0, 2.0, 8.0):
        frame = upload(update, Auto("2 kB", step=3.0), weight=weight).frame
        (parts,) = wire.unpack(frame, layout, plan=plan).parts
        assert bucket.codec.level(parts, layout) == pytest.approx(3.0 / weight, rel=4e-3)
    sizes = [len(upload(update, Auto("2 kB", step=3.0), weight=w).frame) for w in (0.0, 1.0, 2.0, 8.0, 1e6)]
    assert sizes == sorted(sizes)
    assert sizes[0] < 20
    assert 7700 < sizes[-1] <= 8000


def test_an_announced_step_of_the_unbiased_one_shares_bits_by_weight_and_length() -> None:
    sizes = {}
    for scale in (1.0, 2.0):
        update = trained(scale=scale)
        norm = math.sqrt(sum(float(np.square(x, dtype=np.float64).sum()) for x in update.values()))
        for weight in (1.0, 4.0):
            codec = Auto("2 kB", unbiased=True, step=20 * norm / scale)
            sizes[scale, weight] = len(upload(update, codec, weight=weight).frame) - 25
    base = sizes[1.0, 1.0]
    assert [sizes[key] / base for key in ((2.0, 1.0), (1.0, 4.0), (2.0, 4.0))] == pytest.approx([2, 4, 8], rel=0.1)


def test_the_level_of_unbiased_parts_is_the_length_over_the_bits() -> None:
    update = trained()
    layout, plan = Layout.of(update), Plan(Auto("600 B", unbiased=True))
    norm = math.sqrt(sum(float(np.square(x, dtype=np.float64).sum()) for x in update.values()))
    (parts,) = wire.unpack(upload(update, Auto("600 B", unbiased=True)).frame, layout).parts
    bits = 8 * 2.0 ** (-int(parts["rate"]) / 64)
    assert plan.codec.level(parts, layout) == pytest.approx(norm / bits, rel=0.1)


def test_what_factors_leave_is_sent_where_there_is_room() -> None:
    """Of a large and a small layer: decoding, summing and the frame agree, and the error is below that of factors."""
    random = np.random.default_rng(1)
    update = {}
    for name, (rows, columns) in {"large": (90, 80), "wide": (50, 90), "small": (30, 40)}.items():
        structure = random.standard_normal((rows, 2)) @ random.standard_normal((2, columns))
        update[name] = (structure + 0.05 * random.standard_t(3, (rows, columns))).astype(np.float32)
    layout, codec = Layout.of(update), Auto("4 kB")
    x = np.concatenate([value.ravel() for value in update.values()])
    parts = codec.encode(x, layout, np.random.default_rng(0))
    assert int(parts["way"]) == 5
    assert parts["rest"].all()
    decoded, total = codec.decode(parts, layout), np.zeros(layout.size)
    codec.accumulate(parts, layout, total, 0.5)
    assert np.allclose(total, 0.5 * decoded)
    assert nmse(x, decoded) < 1e-3
    (back,) = wire.unpack(upload(update, codec).frame, layout).parts
    assert int(back["way"]) == 5


# --- unbiased --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["60 B", "300 B", "4 kB", "20 kB"])
def test_the_mean_of_many_uploads_is_the_update(budget: str) -> None:
    layout = Layout((Tensor("a", (60, 50)), Tensor("b", (40,))))
    x = np.random.default_rng(3).standard_t(3, layout.size).astype(np.float32)
    codec = Auto(budget, unbiased=True)
    draws = 200
    decoded = np.stack([
        codec.decode(codec.encode(x, layout, fedcomp.generator(seed, 1, 0)), layout) for seed in range(draws)
    ]).astype(np.float64)  # fmt: skip
    variance = decoded.var(axis=0) / draws
    assert np.square(decoded.mean(axis=0) - x).sum() <= 1.5 * variance.sum() + 1e-9


@pytest.mark.parametrize("share", [0.5, 0.9])
@pytest.mark.parametrize("budget", ["100 B", "250 B"])
def test_what_one_value_dominates_is_not_lost(share: float, budget: str) -> None:
    """The others come back whole on average: after one rotation alone they would be several times too small."""
    layout, random = Layout.vector(3000), np.random.default_rng(0)
    x = random.standard_normal(3000).astype(np.float32)
    x[5] = np.sqrt(share / (1 - share) * np.square(np.delete(x, 5)).sum())
    codec = Auto(budget, unbiased=True)
    others = np.arange(3000) != 5
    decoded = [codec.decode(codec.encode(x, layout, fedcomp.generator(s, 1, 0)), layout) for s in range(300)]
    mean = np.mean(decoded, axis=0)
    slope = float(mean[others] @ x[others] / (x[others] @ x[others]))
    assert slope == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("unbiased", [False, True])
def test_budgets_of_all_sizes_are_kept_to(unbiased: bool) -> None:
    """Of updates like a client's, whose factors take long to code and are estimated first."""
    for budget in np.random.default_rng(0).integers(100, 9000, 40):
        for seed in range(2):
            frame = upload(trained(seed), Auto(f"{budget} B", unbiased=unbiased)).frame
            assert len(frame) <= budget


def test_a_step_is_kept_to_where_float32_would_fit() -> None:
    size = sum(x.size for x in trained().values())
    codec = Auto(f"{2 * size} B", step=1.0)
    assert codec.limit(size) == 8 * size
    assert len(upload(trained(), codec).frame) < 2 * size


def test_models_of_verbatim_tensors_alone_have_budgets_too() -> None:
    update = {"norm.weight": np.random.default_rng(0).random(500, np.float32)}
    with pytest.raises(BudgetError, match="budget of 50 bytes: the smallest upload"):
        upload(update, Auto("50 B"))
    assert smallest_frame(Plan(Auto("50 B")), Layout.of(update)) > 1900


def test_rounding_at_random_only_where_it_is_stable_and_clearly_better() -> None:
    """Not below 0.3 bits; above, on values with heavy tails, and not on normal ones, which EDEN is made for."""
    layout, random = Layout.vector(20_000), np.random.default_rng(0)
    normal = random.standard_normal(20_000).astype(np.float32)
    heavy = (normal**3 * (random.random(20_000) < 0.3)).astype(np.float32)
    way = {
        (name, bits): int(Auto(f"{bits} bits", unbiased=True).encode(x, layout, random)["way"])
        for name, x in (("normal", normal), ("heavy", heavy))
        for bits in (0.2, 0.6, 2.0)
    }
    assert [bits for (name, bits), found in way.items() if found == 4 and name == "heavy"] == [0.6, 2.0]
    assert way["normal", 0.2] == way["normal", 0.6] == 3
    assert way["heavy", 0.2] == 6  # a few values dominate: two rotations


def test_stratified_dithers_cancel_over_a_cohort() -> None:
    """All clients hold the same update: the error of the mean is far below that of independent rounding."""
    layout, random = Layout.vector(5000), np.random.default_rng(0)
    x = (random.standard_normal(5000) ** 3).astype(np.float32)
    codec, clients = Auto("1.5 bits", unbiased=True), 10

    def mean(dithers: "list[tuple[int, float] | None]") -> float:
        decoded = []
        for client, dither in enumerate(dithers):
            fitted = codec.for_upload(Upload(codec.limit(5000) or 0, dither=dither))
            parts = fitted.encode(x, layout, fedcomp.generator(0, 1, client))
            assert int(parts["way"]) == 4
            decoded.append(codec.decode(parts, layout))
        return nmse(x, np.mean(decoded, axis=0))

    together = mean([(99, client / clients) for client in range(clients)])
    alone = mean([None] * clients)
    assert together < 0.3 * alone


@pytest.mark.parametrize("budget", [60, 100, 200])
def test_flat_residuals_do_not_end_in_empty_frames(budget: int) -> None:
    """Error feedback leaves what is long and of no rank; some of it must be sent, or training stands still."""
    for seed in range(4):
        random = np.random.default_rng(seed)
        update = {name: x + 2 * random.standard_normal(x.shape, np.float32) for name, x in trained(seed, 0.3).items()}
        codec = Auto(f"{budget} B")
        assert len(upload(update, codec).frame) >= 0.6 * budget
        assert error(update, codec) < 0.999
