"""Budgets: how users write them, phases over rounds, and the control of the mean length from round to round."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import Auto, Budget, ConfigError, Plan, Schedule, parse_codec
from fedcomp.budget import RateControl, phases


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2 kB", 2000),
        ("2kB", 2000),
        ("640 B", 640),
        ("640", 640),
        ("1 byte", 1),
        ("1.5 KiB", 1536),
        ("1.5kiB", 1536),
        ("1 MB", 1_000_000),
        ("2e3 bytes", 2000),
        ("0.05 bits", 312),
        ("0.05 bpp", 312),
        ("0.05 bits per parameter", 312),
        ("0.05 bits/parameter", 312),
        ("30 s at 20 kbit/s", 75_000),
        ("1 min @ 1 Mbps", 7_500_000),
        ("1/1000", 200),
        ("0.1 %", 200),
        (640, 640),
        (99.9, 99),
        (Budget(8, "bits"), 50_000),
    ],
)
def test_what_users_write(text: "str | float | Budget", expected: int) -> None:
    assert Budget.parse(text).bytes(50_000) == expected


@pytest.mark.parametrize(
    "text",
    ["", "much", "16 kb", "2 kb/s", "-3 B", "0 B", "1/0", "nan", "3 s", "30 s at 20 kB", "1e999 B", "2 kB 3"],
)
def test_what_cannot_be_read_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match="budget"):
        Budget.parse(text)


def test_phases() -> None:
    assert phases("60 B") == ((1, "60 B"),)
    assert phases(60) == ((1, "60 B"),)
    assert phases("500 B | 10: 2 kB | 30: 1/100") == ((1, "500 B"), (10, "2 kB"), (30, "1/100"))
    for bad in (
        "10: 2 kB",
        "500 B | 2 kB",
        "500 B | x: 2 kB",
        "500 B | 10: 2 kB | 10: 1 kB",
        "500 B |",
        "1 to 2 over 1",
    ):
        with pytest.raises(ConfigError, match="budget"):
            phases(bad)


def test_budgets_that_grow_and_shrink() -> None:
    growing = phases("60 B to 640 B over 100 rounds")
    sizes = [Budget.parse(text).bytes(1) for _, text in growing]
    rounds = [first for first, _ in growing]
    assert (sizes[0], sizes[-1], rounds[0]) == (60, 640, 1)
    assert rounds == sorted(set(rounds))
    assert rounds[-1] <= 100
    assert all(1.15 < b / a < 1.35 for a, b in pairwise(sizes))
    shrinking = phases("0.1 bits to 0.01 bits over 20")
    assert [Budget.parse(text).bytes(10_000) for _, text in shrinking][:: len(shrinking) - 1] == [125, 12]
    with pytest.raises(ConfigError, match="two of the same kind"):
        phases("60 B to 1/100 over 100 rounds")


def test_a_schedule_takes_budgets_wherever_auto_has_none() -> None:
    schedule = Schedule.parse("float32 | 3: auto | 8: auto('1 kB')").with_budget("500 B | 5: 2 kB")
    found = {r: str(schedule.plan(r).codec) for r in (1, 2, 3, 4, 5, 7, 8, 20)}
    assert found == {
        1: "identity()", 2: "identity()", 3: "auto(budget='500 B')", 4: "auto(budget='500 B')",
        5: "auto(budget='2 kB')", 7: "auto(budget='2 kB')", 8: "auto(budget='1 kB')", 20: "auto(budget='1 kB')",
    }  # fmt: skip
    for uplink in ("sign", "auto('1 kB')"):
        with pytest.raises(ConfigError, match="expected an uplink of auto without a budget"):
            Schedule.parse(uplink).with_budget("1 kB")


def test_settings_of_auto() -> None:
    assert Auto(640) == Auto("640 B")  # type: ignore[arg-type]
    assert parse_codec("auto('2 kB', unbiased=True)") == Auto("2 kB", unbiased=True)
    assert Auto("2 kB").limit(10**6) == 2000
    assert Auto("2 kB", step=0.1).limit(10**6) == 8000
    for wrong in (
        {"budget": "much"},
        {"unbiased": 1},
        {"step": -1.0},
        {"cap": 0.5},
        {"budget": "2 kB", "cap": float("nan")},
    ):
        with pytest.raises(ConfigError):
            Auto(**wrong)
    with pytest.raises(ConfigError, match="give the budget"):
        Plan(Auto()).codec.limit(100)


# --- rate control ----------------------------------------------------------------------------------------------------


def play(
    control: RateControl, rounds: int, clients: int, drift: float, slope: float, noise: float, seed: int
) -> list[float]:
    """Mean lengths of uploads whose updates shrink by `drift` a round, length ~ (norm / step)^slope."""
    random, means, norm = np.random.default_rng(seed), [], 7.0
    for _ in range(rounds):
        step = control.step or norm * 0.01
        sizes = 20 + 300 * (norm * 0.01 / step) ** slope * random.lognormal(0, noise, clients)
        control.observe([int(size) for size in sizes], [step] * clients)
        means.append(float(np.mean([int(size) for size in sizes])))
        norm *= drift
    return means


@given(
    target=st.floats(60, 5000),
    drift=st.floats(0.96, 1.04),
    slope=st.floats(0.7, 2.2),
    noise=st.floats(0, 0.8),
    seed=st.integers(0, 99),
)
def test_the_mean_length_is_kept_to(target: float, drift: float, slope: float, noise: float, seed: int) -> None:
    """Over all rounds but the first few, in which the step is still far off, whatever the codec's slope is."""
    means = play(RateControl(target, 20), 100, 10, drift, slope, noise, seed)
    assert np.mean(means[20:]) == pytest.approx(target, rel=0.1)


def test_rounds_without_updates_do_not_run_away() -> None:
    """A hundred rounds of frames that hold nothing, and none of the steps that would be theirs."""
    control = RateControl(500, 20)
    control.observe([400, 600], [1.0, 4.0])
    for _ in range(100):
        control.observe([21] * 10, [0.0] * 10)
    assert control.step > 0.02
    means = play(control, 40, 10, 1.0, 1.5, 0.1, 0)
    assert np.mean(means[20:]) == pytest.approx(500, rel=0.15)


def test_what_is_taken_for_fixed_may_be_less() -> None:
    """Verbatim tensors that deflate: lengths settle instead of swinging."""
    control, norm = RateControl(1705, 1650), 1.0
    sizes = []
    for _ in range(60):
        step = control.step or 0.01
        size = int(1400 + 300 * (0.01 * norm / step) ** 1.5)
        control.observe([size], [step])
        sizes.append(size)
    assert np.mean(sizes[20:]) == pytest.approx(1671, rel=0.03)
    assert np.std(sizes[30:]) < 60


def test_a_step_is_announced_once_one_is_known() -> None:
    control = RateControl(500, 20)
    control.observe([], [])
    control.observe([400, 600], [0.0, 0.0])
    assert control.step == 0
    control.observe([400, 600], [1.0, 4.0])
    assert control.step == pytest.approx(2)
    control.observe([], [])
    assert control.step == pytest.approx(2)
    control.observe([900, 1100], [2.0, 2.0])
    assert control.step > 2
    before = control.step
    control.aim(500, 20)
    assert control.step == before
    control.aim(250, 20)
    assert control.step > before
