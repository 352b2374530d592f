"""Schedules over rounds, rules by shape kind and size, and bits allotted by measured sensitivity."""

import json
from typing import Any

import numpy as np
import pytest

import fedcomp
from fedcomp import ConfigError, Identity, Layout, Plan, Rule, Sign, Tensor, Uniform
from fedcomp.descriptor import describe, read_plan
from fedcomp.schedule import Schedule
from fedcomp.sensitivity import allot, kl_divergence, measure

LAYOUT = Layout(
    (
        Tensor("conv.weight", (8, 4, 3, 3)),
        Tensor("conv.bias", (32,)),
        Tensor("tok_emb.weight", (50, 20)),
        Tensor("fc.weight", (40, 30)),
        Tensor("norm.weight", (64,)),
        Tensor("small.weight", (5, 5)),
        Tensor("scale", (20,)),
    )
)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("convolution", ["conv.weight"]),
        ("bias", ["conv.bias"]),
        ("vector", ["conv.bias", "scale"]),
        ("embedding", ["tok_emb.weight"]),
        ("matrix", ["fc.weight", "small.weight"]),
        ("normalisation", ["norm.weight"]),
    ],
)
def test_rules_by_kind(kind: str, expected: list[str]) -> None:
    plan = Plan(Identity(), (Rule("*", Sign(), kind=kind),))
    coded = [b for b in plan.buckets(LAYOUT) if b.codec == Sign()]
    assert [t.name for b in coded for t in b.layout.tensors] == expected


def test_the_layered_plan_knows_its_layers() -> None:
    found = {t.name: c and c.name for t, c in zip(LAYOUT.tensors, Plan.layered().assign(LAYOUT), strict=True)}
    assert found == {
        "conv.weight": "uniform", "conv.bias": "uniform", "tok_emb.weight": "uniform", "fc.weight": "lowrank",
        "norm.weight": None, "small.weight": "lowrank", "scale": "uniform",
    }  # fmt: skip


def test_rules_by_size_and_their_configuration() -> None:
    plan = Plan(Uniform(), (Rule("*", Sign(), "matrix", 20, 100), Rule("*.bias", None), Rule("*", Sign(), max_size=20)))
    found = {t.name: str(c) for t, c in zip(LAYOUT.tensors, plan.assign(LAYOUT), strict=True)}
    assert found["small.weight"] == found["scale"] == "sign()"
    assert found["fc.weight"] == "uniform()"
    assert Plan.from_config(json.loads(json.dumps(plan.to_config()))) == plan
    assert read_plan(describe(plan)) == plan
    with pytest.raises(ConfigError, match="kind: expected one of"):
        Rule("*", None, kind="layer")
    with pytest.raises(ConfigError, match=r"rule: unknown keys \['knd'\]"):
        Rule.from_config({"pattern": "*", "knd": "matrix"})


@pytest.mark.parametrize(
    "phases", [[], [(2, "sign")], [(1, "sign"), (1, "int8")], [(1, "sign"), (5, "x")], [(0, "sign")]]
)
def test_schedules_that_make_no_sense(phases: Any) -> None:
    with pytest.raises(ConfigError):
        Schedule.of(phases)


@pytest.mark.parametrize(
    "text", ["", "sign | int8", "2: sign", "sign | 5: x", "sign | every 3: int8", "x: sign", "sign || int8"]
)
def test_texts_that_are_no_schedule(text: str) -> None:
    with pytest.raises(ConfigError):
        Schedule.parse(text)


def test_schedules_as_text() -> None:
    text = "float32 | 6: uniform(8) | 21: topk(0.1, values=uniform(4)) | every 10: float32"
    phases = [(1, "float32"), (6, "uniform(8)"), (21, "topk(0.1, values=uniform(4))")]
    assert Schedule.parse(text) == Schedule.of(phases, full_every=10)


def update() -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(0)
    scales = {"loud": 1.0, "quiet": 1e-3, "middle": 0.1}
    base = {name: np.zeros((40, 50), np.float32) for name in scales}
    new = {name: (rng.standard_normal((40, 50)) * scale).astype(np.float32) for name, scale in scales.items()}
    return base, new


def test_bytes_go_where_the_error_is() -> None:
    base, new = update()
    choices = measure(base, new, [Uniform(b) for b in (1, 2, 4, 8)])
    plan = allot(choices, 2400)
    bits = {rule.pattern: rule.codec.bits for rule in plan.rules if isinstance(rule.codec, Uniform)}
    assert bits["loud"] > bits["quiet"]
    frame = fedcomp.compress(base, new, plan, round=1, rng=np.random.default_rng(0)).frame
    assert len(frame) <= 2400 + 20 + len(describe(plan)) + 1
    even = fedcomp.compress(base, new, Plan(Uniform(2)), round=1, rng=np.random.default_rng(0)).frame
    error = {f: sum(np.square(v - new[n]).sum() for n, v in fedcomp.decompress(f, base).items()) for f in (frame, even)}
    assert error[frame] < error[even] / 2


def test_more_bytes_never_do_more_damage() -> None:
    base, new = update()
    choices = measure(base, new, [Uniform(b) for b in (1, 2, 3, 4, 6, 8)])
    damages = []
    for nbytes in (800, 1200, 2000, 3000, 5000):
        rules = allot(choices, nbytes).rules
        picked = [c for c in choices for r in rules if r.pattern == c.tensor and r.codec == c.codec]
        assert sum(c.nbytes for c in picked) <= nbytes
        damages.append(sum(c.damage for c in picked))
    assert damages == sorted(damages, reverse=True)
    with pytest.raises(ConfigError, match="smallest choices take"):
        allot(choices, 10)


def test_divergence_of_outputs_judges_what_matters() -> None:
    """A layer that the outputs do not depend on needs no bytes, however large its error."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((30, 40))
    base, new = update()

    def outputs(model: Any) -> Any:
        scores = x @ model["quiet"].astype(np.float64) * 300
        e = np.exp(scores - scores.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    choices = measure(base, new, [Uniform(1), Uniform(8)], outputs=outputs)
    plan = allot(choices, 3000)
    codecs = {rule.pattern: rule.codec for rule in plan.rules}
    assert codecs["quiet"] == Uniform(8)
    assert codecs["loud"] == Uniform(1)
    assert kl_divergence(np.array([[0.5, 0.5]]), np.array([[0.5, 0.5]])) == 0
    assert kl_divergence(np.array([[1.0, 0.0]]), np.array([[0.5, 0.5]])) == pytest.approx(np.log(2))


def test_what_becomes_of_small_tensors_can_be_set_for_all_phases() -> None:
    schedule = Schedule.parse("sign | 6: uniform(8)").with_settings(gentle_share=0.0, min_size=3)
    assert [(plan.gentle_share, plan.min_size) for plan in schedule.plans()] == [(0, 3), (0, 3)]
    assert [str(plan.codec) for plan in schedule.plans()] == ["sign()", "uniform()"]
    with pytest.raises(ConfigError, match="gentle_share"):
        schedule.with_settings(gentle_share=2, min_size=0)
    with pytest.raises(ConfigError, match="min_size"):
        schedule.with_settings(gentle_share=0, min_size=-1)
