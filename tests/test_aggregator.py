"""The aggregator: the mean of frames is the mean of decoded models, whatever the order, the weights and the faults."""

import tracemalloc
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from codec_list import CODECS, IDS
from numpy.typing import NDArray

import fedcomp
from fedcomp import Codec, ConfigError, CountSketch, FrameError, Plan, parse_codec
from fedcomp.codecs.sketch import sketch
from fedcomp.device import running_sum
from fedcomp_strategies.aggregator import Aggregator

Model = dict[str, NDArray[Any]]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=IDS)


def a_base() -> Model:
    random = np.random.default_rng(0)
    return {
        "fc1.weight": random.standard_normal((30, 40)).astype(np.float32),
        "fc1.bias": np.zeros(40, np.float32),
        "conv": random.standard_normal((6, 4, 3, 3)).astype(np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "fc2.weight": random.standard_normal((40, 3)),
        "bn.running_var": np.ones(40, np.float32),
        "steps": np.array(3),
        "mask": np.array([True, False, True]),
    }


def trained(base: Model, node: int) -> Model:
    random = np.random.default_rng(node)
    new = {}
    for name, values in base.items():
        if values.dtype.kind == "f":
            new[name] = (values + random.standard_normal(values.shape) ** 3 / 50).astype(values.dtype)
        else:
            new[name] = np.asarray(values + node % 100 if name == "steps" else random.random(values.shape) < 0.5)
    new["fc1.weight"][:10] = base["fc1.weight"][:10]
    return new


def frame(base: Model, new: Model, plan: Plan, node: int = 0) -> bytes:
    return fedcomp.compress(base, new, plan, round=5, rng=fedcomp.generator(1, 5, node)).frame


def numpy_mean(models: list[Model], weights: list[float]) -> Model:
    total = sum(weights)
    return {
        name: np.sum([m[name].astype(np.float64) * (w / total) for m, w in zip(models, weights, strict=True)], axis=0)
        for name in models[0]
    }


def assert_close(got: Model, expected: Model) -> None:
    assert list(got) == list(expected)
    for name, values in expected.items():
        assert got[name].shape == values.shape
        assert np.allclose(got[name], values, rtol=1e-6, atol=1e-6), name


@every_codec
@pytest.mark.parametrize("weights", [[1, 7, 3], [0, 5, 2], [1e18, 1, 3.5]], ids=str)
def test_the_mean_of_frames_is_the_mean_of_decoded_models(codec: Codec, weights: list[float]) -> None:
    base, plan = a_base(), Plan(codec, min_size=0)
    aggregator, decoded = Aggregator(base, plan, round=5, device="cpu"), []
    for node, weight in enumerate(weights):
        sent = frame(base, trained(base, node), plan, node)
        decoded.append(fedcomp.decompress(sent, base, plan=plan, round=5))
        aggregator.add(sent, weight, node=node)
    mean = aggregator.mean()
    assert not mean.failed
    assert mean.weight == sum(weights)
    model = mean.model(base)
    assert_close(model, numpy_mean(decoded, weights))
    assert all(model[name].dtype == values.dtype for name, values in base.items() if values.dtype.kind == "f")
    assert model["steps"].dtype == model["mask"].dtype == np.float64
    largest = mean.model(base, integers="max")
    assert largest["steps"] == 3 + 2
    assert largest["steps"].dtype == np.int64
    assert np.array_equal(largest["mask"], np.any([m["mask"] for m in decoded], axis=0))


@pytest.mark.parametrize(
    "text", ["topk(0.1, values=uniform(4))", "sign", "int8", "ecsq(bits=1)", "lowrank(2)", "eden(1)", "sketch(ratio=3)"]
)
def test_the_order_of_arrival_changes_no_bit(text: str) -> None:
    base, plan = a_base(), Plan(parse_codec(text))
    frames = {node: frame(base, trained(base, node), plan, node) for node in (3, 9, 2**63, 11)}
    results = []
    for order in permutations([*frames, 20]):
        aggregator = Aggregator(base, plan, round=5, device="cpu")
        for node in order:
            if node == 20:
                aggregator.add_plain(trained(base, 20), 4, node=20)
            else:
                aggregator.add(frames[node], node % 8 + 1, node=node)
        results.append(aggregator.mean().model(base))
    assert all(np.array_equal(r[name], values) for r in results[1:] for name, values in results[0].items())


def test_plain_replies_and_shared_updates_count_along() -> None:
    base, plan = a_base(), Plan(parse_codec("int8"))
    news = [trained(base, node) for node in range(3)]
    aggregator = Aggregator(base, plan, round=5, device="cpu")
    sent = frame(base, news[0], plan)
    aggregator.add(sent, 2, node=0)
    for node in (1, 2):
        aggregator.add_plain(dict(reversed(news[node].items())), node, node=node)
    predictor = {"fc1.weight": np.ones((30, 40), np.float32)}
    for node in (0, 1, 7):  # 7 never replied
        aggregator.add_update(predictor, 1.5, node=node)
    expected = numpy_mean([fedcomp.decompress(sent, base), *news[1:]], [2, 1, 2])
    expected["fc1.weight"] += 3 / 5
    assert_close(aggregator.mean().model(base), expected)


def test_a_frame_may_be_relative_to_another_base() -> None:
    base, plan = a_base(), Plan(parse_codec("float32"))
    rounded = {name: (v + 1).astype(v.dtype) if v.dtype.kind == "f" else v for name, v in base.items()}
    new = {name: (v + 1).astype(v.dtype) if v.dtype.kind == "f" else v for name, v in rounded.items()}
    aggregator = Aggregator(base, plan, round=5, device="cpu")
    aggregator.add(frame(rounded, new, plan), 1, node=0)
    assert np.allclose(aggregator.mean().update["fc1.weight"], 1)


def test_bad_replies_are_left_out_and_told_of() -> None:
    base, plan = a_base(), Plan(parse_codec("int8"))
    good = [frame(base, trained(base, node), plan, node) for node in range(2)]
    integers = {**trained(base, 4), "fc1.weight": np.zeros((30, 40), np.int64)}
    not_finite = {**trained(base, 5), "fc1.bias": np.full(40, np.nan, np.float32)}
    aggregator = Aggregator(base, plan, round=5, device="cpu")
    for node, sent in enumerate(
        [
            *good,
            good[0][:-1],
            bytes([*good[0][:-1], good[0][-1] ^ 1]),
            frame(base, integers, plan),
            frame({"w": np.ones(50)}, {"w": np.zeros(50)}, plan),
            frame(base, trained(base, 6), Plan(parse_codec("sign"))),
            fedcomp.compress(base, trained(base, 7), plan, round=6, rng=fedcomp.generator(0, 6, 0)).frame,
        ]
    ):
        aggregator.add(sent, 3, node=node)
    plain: list[Model] = [not_finite, {"w": np.ones(3)}, integers, {**a_base(), "fc1.bias": np.zeros(41)}]
    for node, model in enumerate(plain, 8):
        aggregator.add_plain(model, 1e18, node=node)
    mean = aggregator.mean()
    told = [
        "checksum", "checksum", "turn floating-point tensors into integers", "another model", "another plan",
        "round 6", "'fc1.bias'", "missing tensors", "turn floating-point tensors into integers", "shape",
    ]  # fmt: skip
    assert sorted(mean.failed) == list(range(2, 12))
    for node, part in enumerate(told, 2):
        assert part in str(mean.failed[node])
    assert sorted(mean.contents) == [0, 1]
    assert mean.weight == 6
    assert_close(mean.model(base), numpy_mean([fedcomp.decompress(sent, base) for sent in good], [3, 3]))


def test_tensors_that_are_verbatim_anyway_may_turn_into_integers() -> None:
    """FedAvg averages counters to float64; clients go on counting in int64."""
    base, plan = {"w": np.ones(50, np.float32), "n": np.array(3.5)}, Plan(parse_codec("int8"))
    new = {"w": np.zeros(50, np.float32), "n": np.array(4)}
    aggregator = Aggregator(base, plan, round=5, device="cpu")
    aggregator.add(frame(base, new, plan), 1, node=0)
    aggregator.add_plain({**new, "n": np.array(5)}, 1, node=1)
    model = aggregator.mean().model(base)
    assert (float(model["n"]), model["n"].dtype) == (4.5, np.dtype("float64"))


@pytest.mark.parametrize("plain", [False, True])
def test_one_model_beyond_its_dtype_does_not_spoil_the_others(plain: bool) -> None:
    base = {"w": np.full((4, 20), -3e38 if plain else 6e4, np.float32)}
    plan = Plan(parse_codec("float32"), min_size=0)
    half = {"w": np.full((4, 20), 6e4, np.float16)}
    aggregator = Aggregator(base, plan, round=5, device="cpu")
    if plain:
        near = {"w": np.full((4, 20), -3.1e38, np.float32)}
        aggregator.add_plain({"w": np.full((4, 20), 3e38, np.float32)}, 1e18, node=1)
        aggregator.add_plain(near, 1, node=2)
    else:
        near = {"w": np.full((4, 20), 6.2e4, np.float16)}
        # From a base of its own: added to ours, the update passes the limit of float16.
        aggregator.add(frame({"w": np.zeros((4, 20), np.float32)}, half, plan), 1e18, node=1)
        aggregator.add(frame(base, near, plan), 1, node=2)
    mean = aggregator.mean()
    assert list(mean.failed) == [1]
    assert "'w'" in str(mean.failed[1])
    assert mean.weight == 1
    assert np.allclose(mean.model(base)["w"], near["w"], rtol=1e-3)


def test_values_near_the_limit_are_no_fault() -> None:
    base = {"w": np.zeros((4, 20), np.float32)}
    plan = Plan(parse_codec("float32"), min_size=0)
    aggregator = Aggregator(base, plan, round=5, device="cpu")
    top = float(np.finfo(np.float32).max)
    for node in range(3):
        aggregator.add(frame(base, {"w": np.full((4, 20), top, np.float32)}, plan), 1 / 3 + node, node=node)
    mean = aggregator.mean()
    assert not mean.failed
    assert np.allclose(mean.model(base)["w"], top, rtol=1e-6)


def test_nothing_good_leaves_the_base() -> None:
    base, plan = a_base(), Plan(parse_codec("int8"))
    aggregator = Aggregator(base, plan, round=5, device="cpu")
    aggregator.add(b"nothing", 5, node=1)
    mean = aggregator.mean()
    assert mean.weight == 0
    assert isinstance(mean.failed[1], FrameError)
    assert all(np.array_equal(values, base[name]) for name, values in mean.model(base).items())


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), 2e18])
def test_impossible_weights_are_refused(weight: float) -> None:
    aggregator = Aggregator(a_base(), Plan(parse_codec("int8")), round=5, device="cpu")
    with pytest.raises(ConfigError, match=r"weight of node 3: expected 0 to 1e\+18"):
        aggregator.add(b"", weight, node=3)


def test_a_node_counts_once() -> None:
    aggregator = Aggregator(a_base(), Plan(parse_codec("int8")), round=5, device="cpu")
    aggregator.add(b"", 1, node=3)
    with pytest.raises(ConfigError, match="node 3 has replied already"):
        aggregator.add_plain({}, 1, node=3)


def test_tables_of_sketches_add_up() -> None:
    base, codec = {"w": np.zeros((30, 20), np.float32)}, CountSketch(rows=3, ratio=2.0)
    plan = Plan(codec, min_size=0)
    updates = [np.random.default_rng(node).standard_normal((30, 20), np.float32) for node in range(3)]
    aggregator = Aggregator(base, plan, round=5, device="cpu", tables=True)
    for node in range(2):
        aggregator.add(frame(base, {"w": updates[node]}, plan), node + 1, node=node)
    aggregator.add_plain({"w": updates[2]}, 3, node=2)
    mean = aggregator.mean()
    expected = sketch(np.average(updates, axis=0, weights=[1, 2, 3]).ravel().astype(np.float32), 3, 100, codec.seed)
    assert not mean.update
    assert np.allclose(mean.tables[0], expected.ravel(), atol=1e-5)
    with pytest.raises(ConfigError, match="sketches with seed=0"):
        Aggregator(base, Plan(CountSketch(ratio=2.0, seed=0)), round=5, tables=True)


def peak_of_topk(clients: int, parameters: int) -> tuple[int, int]:
    """Peak bytes of collecting and averaging frames of 1 %, and the bytes of the frames."""
    base = {"w": np.zeros((parameters // 1000, 1000), np.float32)}
    plan = Plan(parse_codec("topk(0.01, values=uniform(8))"))
    new = {"w": np.random.default_rng(0).standard_normal(base["w"].shape, np.float32)}
    sent = frame(base, new, plan)
    frames = [bytes(bytearray(sent)) for _ in range(clients)]
    running_sum(1, "cpu")  # loads torch, which is not of interest here
    tracemalloc.start()
    try:
        aggregator = Aggregator(base, plan, round=5, device="cpu")
        for node, received in enumerate(frames):
            aggregator.add(received, 1, node=node)
        model = aggregator.mean().model(base)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert model["w"].shape == base["w"].shape
    return peak, sum(map(len, frames))


@pytest.mark.parametrize("parameters", [1_000_000, pytest.param(12_500_000, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_clients(parameters: int) -> None:
    (few, _), (many, _) = peak_of_topk(200, parameters), peak_of_topk(400, parameters)
    assert few < 3 * 4 * parameters
    assert many < few + 400 * 1000  # bookkeeping
