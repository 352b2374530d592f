"""Which tensors get which codec, requests, and residuals: everything around the codecs that is not Flower."""

import json
import logging
import os
import pickle
import subprocess
import sys
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

import fedcomp
from fedcomp import (
    CAFe,
    ConfigError,
    ErrorFeedback,
    Identity,
    Layout,
    LayoutError,
    Memory,
    NonFiniteError,
    Plan,
    Rule,
    Sign,
    Tensor,
    TopK,
    Uniform,
)
from fedcomp.feedback import EMPTY
from fedcomp.plan import as_plan
from fedcomp.request import Request

MODEL = Layout(
    (
        Tensor("conv1.weight", (8, 1, 5, 5)),
        Tensor("conv1.bias", (8,)),
        Tensor("bn1.weight", (32,)),
        Tensor("seq.1.weight", (32,)),
        Tensor("seq.1.bias", (32,)),
        Tensor("seq.1.running_mean", (32,)),
        Tensor("seq.1.running_var", (32,)),
        Tensor("seq.1.num_batches_tracked", (), "int64"),
        Tensor("encoder.layer_norm.weight", (64,)),
        Tensor("mask", (64,), "bool"),
        Tensor("fc.weight", (64, 10), "float64"),
        Tensor("fc.bias", (16,), "float16"),
    )
)


def names(tensors: Any) -> list[str]:
    return [t.name for t in tensors]


def test_what_must_not_lose_anything_travels_verbatim() -> None:
    (bucket,) = Plan(Uniform()).buckets(MODEL)
    assert names(bucket.layout.tensors) == ["conv1.weight", "fc.weight", "fc.bias"]
    assert names(Plan(Uniform()).verbatim(MODEL)) == [
        n for n in names(MODEL.tensors) if n not in names(bucket.layout.tensors)
    ]


def test_small_layers_are_coded_gently_where_the_codec_would_starve_them() -> None:
    """The smallest tensors, as long as they are at most 2 % of the elements that no rule names."""
    shapes = {"out.bias": 20, "hid.bias": 100, "other.bias": 100, "hid.weight": 10_000, "ruled": 16}
    layout = Layout(tuple(Tensor(name, (size,)) for name, size in shapes.items()))
    plan = Plan(TopK(0.01), (Rule("ruled", Sign()),))
    assert [(str(b.codec), names(b.layout.tensors)) for b in plan.buckets(layout)] == [
        ("uniform(bits=4)", ["out.bias", "hid.bias"]),
        ("topk(fraction=0.01)", ["other.bias", "hid.weight"]),
        ("sign()", ["ruled"]),
    ]
    (bucket,) = Plan(TopK(0.01), gentle_share=0).buckets(Layout(layout.tensors[:4]))
    assert names(bucket.layout.tensors) == list(shapes)[:4]
    for codec in (Uniform(1), TopK(0.25), TopK(k=3)):
        assert len(Plan(codec).buckets(Layout(layout.tensors[:4]))) == 1


def test_rules_come_first_and_the_first_match_wins() -> None:
    plan = Plan(
        Sign(),
        (Rule("fc.*", Uniform(8)), Rule("*.bias", None), Rule("seq.1.running_var", Identity()), Rule("mask", Sign())),
    )
    assert [(str(b.codec), names(b.layout.tensors)) for b in plan.buckets(MODEL)] == [
        ("sign()", ["conv1.weight"]),
        ("identity()", ["seq.1.running_var"]),
        ("uniform()", ["fc.weight", "fc.bias"]),
    ]


def test_min_size_zero_codes_every_float() -> None:
    layout = Layout((Tensor("a", ()), Tensor("b", (0,)), Tensor("c", (), "int8")))
    (bucket,) = Plan(Sign(), min_size=0, gentle_share=0).buckets(layout)
    assert names(bucket.layout.tensors) == ["a", "b"]


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({}, "expected a mapping with the key 'codec'"),
        ([], "expected a mapping"),
        ({"codec": {"codec": "sign"}, "rule": 1}, r"unknown keys \['rule'\]; known: codec, rules, min_size"),
        ({"codec": {"codec": "sign"}, "rules": 3}, "rules: expected a list"),
        ({"codec": {"codec": "sign"}, "rules": [["a"]]}, "rules: expected a list"),
        ({"codec": {"codec": "sign"}, "rules": [[3, None]]}, "pattern: expected a str"),
        ({"codec": {"codec": "sign"}, "min_size": -1}, "min_size: expected a whole number"),
        ({"codec": "sign"}, "codec: expected a mapping"),
    ],
)
def test_wrong_plans_are_named(config: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Plan.from_config(config)


def test_users_may_write_a_plan_as_text_or_codec() -> None:
    assert as_plan("topk(0.1)") == as_plan(TopK(0.1)) == as_plan(Plan(TopK(0.1))) == Plan(TopK(0.1))
    with pytest.raises(ConfigError, match="plan: expected a Plan, got 3"):
        as_plan(3)  # type: ignore[arg-type]


def test_layouts_are_named_by_names_and_shapes() -> None:
    a = Layout.of({"w": np.zeros((2, 3)), "b": np.zeros(3)})
    assert a.digest == Layout.of({"w": np.ones((2, 3), "f2"), "b": np.ones(3)}).digest
    others: list[dict[str, Any]] = [
        {"w": np.zeros((3, 2)), "b": np.zeros(3)},
        {"b": np.zeros(3), "w": np.zeros((2, 3))},
        {"w": np.zeros((2, 3))},
    ]
    assert len({a.digest, *(Layout.of(o).digest for o in others)}) == 4
    with pytest.raises(LayoutError, match=r"must differ, got \['x'\] twice"):
        Layout((Tensor("x", (1,)), Tensor("x", (2,))))


# --- compress --------------------------------------------------------------------------------------------------------


def compress(base: Any, new: Any, **options: Any) -> fedcomp.CompressedUpdate:
    return fedcomp.compress(base, new, Plan(Uniform(8)), round=1, rng=np.random.default_rng(0), **options)


def test_tensors_are_matched_by_name_whatever_their_order() -> None:
    """c19: equal shapes in another order would be averaged silently."""
    rng = np.random.default_rng(0)
    base = {n: np.zeros((5, 5), np.float32) for n in "ab"}
    new = {n: rng.standard_normal((5, 5)).astype(np.float32) for n in "ba"}
    back = fedcomp.decompress(compress(base, new).frame, base)
    assert list(back) == ["a", "b"]
    assert np.allclose(back["a"], new["a"], atol=0.02)


@pytest.mark.parametrize(
    ("new", "match"),
    [
        ({"a": np.zeros(20)}, r"trained model: missing tensors \['b'\], unexpected tensors \[\]"),
        ({"a": np.zeros(20), "b": np.zeros(20), "c": np.zeros(1)}, r"unexpected tensors \['c'\]"),
        ({"a": np.zeros(20), "b": np.zeros(1)}, r"tensor 'b' has shape \(1,\), expected \(20,\)"),
    ],
)
def test_models_that_do_not_fit_are_named(new: Any, match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        compress({"a": np.zeros(20), "b": np.zeros(20)}, new)


def test_values_that_are_not_finite_are_named_in_every_kind_of_tensor() -> None:
    base = {"w": np.zeros((5, 5), np.float32), "scalar": np.array(1.0), "running_var": np.ones(30)}
    for name in base:
        new = {n: a.copy() for n, a in base.items()}
        new[name].flat[0] = np.inf
        with pytest.raises(NonFiniteError, match=f"tensor '{name}'"):
            compress(base, new)


def test_an_update_beyond_float32_is_refused_by_name() -> None:
    with pytest.raises(NonFiniteError, match="tensor 'w'"):
        compress({"w": np.full(20, -3e38, np.float32)}, {"w": np.full(20, 3e38, np.float32)})


# --- feedback --------------------------------------------------------------------------------------------------------


def test_feedback_through_compress_telescopes_and_is_keyed_by_name() -> None:
    rng = np.random.default_rng(0)
    base = {"w": np.zeros((10, 10), np.float32), "b": np.zeros(4, np.float32)}
    memory = EMPTY
    sent, given = np.zeros((10, 10)), np.zeros((10, 10))
    for step in range(20):
        new = {"w": rng.standard_normal((10, 10)).astype(np.float32), "b": np.ones(4, np.float32)}
        plan = Plan(TopK(0.05, values=Uniform(4)))
        update = fedcomp.compress(base, new, plan, round=step, rng=rng, feedback=ErrorFeedback(), memory=memory)
        memory = update.memory
        sent += fedcomp.decompress(update.frame, base)["w"]
        given += new["w"]
    assert set(memory.slots["residual"]) == {"w"}
    assert np.allclose(sent + memory.slots["residual"]["w"], given, atol=1e-4)


def test_residuals_that_do_not_fit_are_dropped_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """c31"""
    layout = Layout((Tensor("kept", (3,)), Tensor("reshaped", (2, 2)), Tensor("bad", (1,))))
    slots = {
        "kept": np.ones(3, np.float32),
        "reshaped": np.ones(4, np.float32),
        "bad": np.array([np.nan], np.float32),
        "gone": np.ones(9, np.float32),
    }
    with caplog.at_level(logging.WARNING):
        residual = Memory(1, {"residual": slots}).flat("residual", layout)
    assert residual.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert "'reshaped'" in caplog.text
    assert "'bad'" in caplog.text
    assert "'kept'" not in caplog.text


def test_errors_leave_the_residual_alone() -> None:
    memory = Memory(1, {"residual": {"w": np.ones(20, np.float32)}})
    with pytest.raises(NonFiniteError):
        compress(
            {"w": np.zeros(20, np.float32)},
            {"w": np.full(20, np.nan, np.float32)},
            feedback=ErrorFeedback(),
            memory=memory,
        )
    assert memory.slots["residual"]["w"].tolist() == [1] * 20


# --- requests --------------------------------------------------------------------------------------------------------


def test_requests_round_trip() -> None:
    request = Request(Plan(TopK(0.01, values=Uniform(8)), (Rule("*.bias", None),)), 12, CAFe(beta=0.8), 3)
    assert Request.from_text(request.to_text()) == request


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "{", "[]", '{"v":2}', '{"v":1}', "[" * 100_000,
        '{"v":1,"plan":{"codec":{"codec":"new"}},"feedback":"none","round":1,"seed":0,"session":"a"}',
        '{"v":1,"plan":{"codec":{"codec":"sign"}},"feedback":"maybe","round":1,"seed":0,"session":"a"}',
        '{"v":1,"plan":{"codec":{"codec":"sign"}},"feedback":"none","round":-1,"seed":0,"session":"a"}',
        '{"v":1,"plan":{"codec":{"codec":"sign"}},"feedback":"none","round":true,"seed":0,"session":"a"}',
        '{"v":1,"plan":{"codec":{"codec":"sign"}},"feedback":"none","round":1,"seed":0,"session":"a","more":1}',
        '{"v":1,"plan":{"codec":{"codec":"sign"}},"feedback":"none","round":1,"seed":0,"session":"../x"}',
    ],
)  # fmt: skip
def test_requests_that_make_no_sense_are_errors_of_configuration(text: str) -> None:
    with pytest.raises(ConfigError):
        Request.from_text(text)


def test_randomness_hangs_on_seed_round_and_node_alone() -> None:
    draws = {key: fedcomp.generator(*key).integers(2**62) for key in [(0, 1, 2), (0, 2, 1), (1, 0, 2), (0, 1, 2**64)]}
    assert len(set(draws.values())) == 4
    assert fedcomp.generator(0, 1, 2).integers(2**62) == draws[0, 1, 2]
    assert fedcomp.generator(0, 1, 2).bit_generator.__class__.__name__ == "Philox"
    assert json.dumps(int(draws[0, 1, 2]))


def test_plans_and_layouts_are_the_same_keys_in_another_process() -> None:
    """Hashes of texts differ between processes, so that one kept in a pickle would be wrong there."""
    things: list[Any] = [MODEL, Plan(TopK(0.01), (Rule("*.bias", Uniform(8)),))]
    assert all(hash(thing) for thing in things)  # which they remember from now on
    code = (
        "import pickle, sys; told = pickle.load(sys.stdin.buffer); "
        "print(all(hash(thing) == hash(type(thing)(**values)) for thing, values in told))"
    )
    told = [(thing, {f.name: getattr(thing, f.name) for f in fields(thing)}) for thing in things]
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(told),
        capture_output=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "77"},
    )
    assert done.stdout.strip() == b"True"
