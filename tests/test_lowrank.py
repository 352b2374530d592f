"""Low rank, PowerSGD and tensor trains: exactness, optimality, shared starts, and what forged factors can do."""

import json
from typing import Any

import numpy as np
import pytest
from families_lowrank import CODECS
from numpy.typing import NDArray

import fedcomp
from fedcomp import Codec, ConfigError, FrameError, Identity, Layout, LayoutError, Plan, Tensor, Uniform, nmse, wire
from fedcomp.codec import Count, Floats, Positions, Symbols
from fedcomp.codecs.lowrank import LowRank, from_matrix, thin_shapes, to_matrix, truncated_svd
from fedcomp.codecs.powersgd import PowerSGD, Start
from fedcomp.codecs.tensortrain import TensorTrain
from fedcomp.descriptor import describe, read_plan
from fedcomp.layout import Vector

MAX = float(np.finfo(np.float32).max)
LAYOUT = Layout((Tensor("conv", (16, 8, 3, 3)), Tensor("bias", (16,)), Tensor("fc", (40, 60)), Tensor("top", (3, 4))))
exact = pytest.mark.parametrize("codec", [LowRank(1), LowRank(5), PowerSGD(1), PowerSGD(3), TensorTrain(4)], ids=str)


def rng(seed: int = 0) -> np.random.Generator:
    return fedcomp.generator(seed, 1, 0)


def back(codec: Codec, x: Vector, layout: Layout, seed: int = 0) -> Vector:
    return codec.decode(codec.encode(x, layout, rng(seed)), layout)


def matrix(m: int, n: int, decay: float, seed: int = 0) -> NDArray[np.float32]:
    """A matrix with singular values decay^k."""
    random = np.random.default_rng(seed)
    u = np.linalg.qr(random.standard_normal((m, min(m, n))))[0]
    v = np.linalg.qr(random.standard_normal((n, min(m, n))))[0]
    out: NDArray[np.float32] = ((u * decay ** np.arange(min(m, n))) @ v.T).astype(np.float32)
    return out


@exact
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_what_has_the_rank_comes_back_exactly(codec: Codec, scale: float) -> None:
    random = np.random.default_rng(1)
    x = np.zeros(LAYOUT.size, np.float32)
    for tensor, where in LAYOUT.slices():
        if isinstance(codec, TensorTrain):
            x[where] = random.standard_normal(1)  # constants have tensor-train rank 1
        elif thin := thin_shapes(tensor, 1):
            (m, _), (_, n) = thin
            whole = random.standard_normal((m, 1), np.float32) * random.standard_normal((1, n), np.float32)
            x[where] = from_matrix(whole, tensor)
        else:
            x[where] = random.standard_normal(tensor.size)
    x *= np.float32(scale)
    assert np.abs(back(codec, x, LAYOUT) - x).max() <= 1e-5 * np.abs(x).max()


def test_sizes() -> None:
    """Factors, and biases and small matrices as they are."""
    parts = LowRank(2).encode(np.ones(LAYOUT.size, np.float32), LAYOUT, rng())
    assert parts["factors.values"].size == 2 * (48 + 24) + 16 + 2 * 100 + 12
    parts = TensorTrain(2).encode(np.ones(LAYOUT.size, np.float32), LAYOUT, rng())
    assert parts["factors.values"].size == (8 + 16 + 8 + 16 + 12 + 6) + 16 + (10 + 32 + 24 + 20) + 12


def test_convolutions_are_regrouped_where_that_is_squarer() -> None:
    conv, wide = Tensor("w", (64, 32, 3, 3)), Tensor("w", (8, 1, 5, 5))
    assert thin_shapes(conv, 4) == ((192, 4), (4, 96))
    assert thin_shapes(wide, 1) == ((8, 1), (1, 25))
    x = np.arange(conv.size, dtype=np.float32)
    assert np.array_equal(from_matrix(to_matrix(x, conv), conv), x)
    assert to_matrix(x, conv)[1, 0] == x.reshape(conv.shape)[0, 0, 1, 0]


@pytest.mark.parametrize("rank", [1, 4, 16])
@pytest.mark.parametrize("decay", [0.95, 0.7])
def test_lowrank_is_near_the_best(rank: int, decay: float) -> None:
    x = matrix(150, 100, decay)
    best = float(np.square(np.linalg.svd(x)[1][rank:].astype(np.float64)).sum())
    layout = Layout((Tensor("w", x.shape),))
    off = float(np.square(back(LowRank(rank), x.ravel(), layout).astype(np.float64) - x.ravel()).sum())
    assert off <= 1.05 * best + 1e-10


def test_truncated_svd_of_nothing_and_of_too_little() -> None:
    left, right = truncated_svd(np.zeros((20, 30), np.float32), 3, rng())
    assert not left.any()
    assert not right.any()
    one = np.zeros((20, 30), np.float32)
    one[3, 4] = 1
    left, right = truncated_svd(one, 3, rng())
    assert np.allclose(left @ right, one, atol=1e-6)


def test_a_tensor_that_would_come_out_worse_than_zero_is_zero() -> None:
    """One bit for the factors of a single spike makes all values as large as the spike."""
    x = np.zeros(900, np.float32)
    x[31] = 5
    layout = Layout((Tensor("w", (30, 30)),))
    codec = LowRank(8, factors=Uniform(1, rounding="stochastic"))
    parts = codec.encode(x, layout, rng())
    assert parts["kept"].tolist() == [0]
    assert not codec.decode(parts, layout).any()
    assert LowRank(8, factors=Uniform(8)).encode(x, layout, rng())["kept"].tolist() == [1]


class TestPowerSGD:
    layout = Layout((Tensor("w", (50, 70)), Tensor("b", (50,)), Tensor("v", (20, 30))))

    def test_it_is_the_projection_on_what_the_start_spans(self) -> None:
        x = matrix(50, 70, 0.8)
        start = np.linalg.qr(np.random.default_rng(3).standard_normal((70, 4)))[0].astype(np.float32)
        shared = Start.of([start])
        codec = PowerSGD(4, start=shared)
        decoded = back(codec, x.ravel(), Layout((Tensor("w", x.shape),))).reshape(x.shape)
        p = np.linalg.qr(x @ shared.values.reshape(70, 4))[0]
        assert np.allclose(decoded, p @ (p.T @ x), atol=1e-5)
        assert np.abs(p.T @ (x - decoded)).max() < 1e-5

    def test_a_warm_start_lowers_the_error(self) -> None:
        x = np.concatenate([matrix(50, 70, 0.8).ravel(), np.ones(50, np.float32), matrix(20, 30, 0.8).ravel()])
        codec: Codec = PowerSGD(3)
        errors = []
        for _ in range(4):
            errors.append(nmse(x, back(codec, x, self.layout)))
            codec = codec.adapt(x, self.layout, rng())
        best = nmse(x, back(LowRank(3), x, self.layout))
        assert errors == sorted(errors, reverse=True)
        assert errors[-1] <= 1.06 * best < errors[0]

    def test_a_layer_that_did_not_move_keeps_its_start(self) -> None:
        x = np.zeros(self.layout.size, np.float32)
        x[-600:] = matrix(20, 30, 0.8).ravel()
        cold = PowerSGD(3)
        warm = cold.adapt(x, self.layout, rng())
        assert isinstance(warm, PowerSGD)
        assert warm.start is not None
        assert warm.start.values[:210].any()
        assert nmse(x, back(warm, x, self.layout)) < nmse(x, back(cold, x, self.layout))

    def test_without_warm_nothing_changes(self) -> None:
        codec = PowerSGD(3, warm=False)
        assert codec.adapt(np.ones(self.layout.size, np.float32), self.layout, rng()) is codec
        assert PowerSGD(3).adapt(np.ones(5, np.float32), Layout.vector(5), rng()) == PowerSGD(3)

    def test_the_start_travels_in_the_configuration_not_in_the_frame(self) -> None:
        x = np.random.default_rng(4).standard_normal(self.layout.size, np.float32)
        codec = PowerSGD(3).adapt(x, self.layout, rng())
        assert fedcomp.from_config(json.loads(json.dumps(fedcomp.to_config(codec)))) == codec
        plan = Plan(codec, min_size=0, gentle_share=0)
        frame = wire.pack(wire.Contents(plan, self.layout, 1, [codec.encode(x, self.layout, rng())], {}), self.layout)
        cold = Plan(PowerSGD(3), min_size=0, gentle_share=0)
        parts = PowerSGD(3).encode(x, self.layout, rng())
        other = wire.pack(wire.Contents(cold, self.layout, 1, [parts], {}), self.layout)
        assert len(frame) <= len(other) + 9
        (got,) = wire.unpack(frame, self.layout, plan=plan).parts
        assert np.array_equal(codec.decode(got, self.layout), back(codec, x, self.layout))
        with pytest.raises(FrameError, match="side information"):
            read_plan(describe(plan))

    def test_bad_starts(self) -> None:
        with pytest.raises(LayoutError, match="another model"):
            back(PowerSGD(3, start=Start(bytes(6))), np.zeros(self.layout.size, np.float32), self.layout)
        for bad in ("?", "AAAA", "AHw="):  # not base64, three bytes, infinity
            with pytest.raises(ConfigError):
                fedcomp.from_config({"codec": "powersgd", "start": bad})


def test_tensor_train_is_exact_at_full_rank_and_better_with_more() -> None:
    x = matrix(64, 36, 0.7)
    layout = Layout((Tensor("w", x.shape),))
    errors = [nmse(x.ravel(), back(TensorTrain(rank), x.ravel(), layout)) for rank in (1, 2, 4, 8, 16)]
    assert errors == sorted(errors, reverse=True)
    random = np.random.default_rng(5)
    cores = [random.standard_normal(shape) for shape in ((1, 8, 3), (3, 8, 2), (2, 6, 3), (3, 6, 1))]
    train = np.einsum("aib,bjc,ckd,dle->ijkl", *cores).reshape(64, 36).astype(np.float32)
    assert nmse(train.ravel(), back(TensorTrain(3), train.ravel(), layout)) < 1e-10


@pytest.mark.parametrize("codec", [LowRank(4), PowerSGD(4), TensorTrain(4)], ids=str)
def test_factors_are_balanced(codec: Codec) -> None:
    """One step for all factors must suit all: their root mean squares are alike."""
    x = matrix(64, 64, 0.9) * np.float32(1e-3)
    layout = Layout((Tensor("w", x.shape),))
    off = nmse(x.ravel(), back(codec, x.ravel(), layout))
    coarse = type(codec)(rank=4, factors=Uniform(8))  # type: ignore[call-arg]
    assert nmse(x.ravel(), back(coarse, x.ravel(), layout)) <= off + 0.01
    values = codec.encode(x.ravel(), layout, rng())["factors.values"]
    sizes = [np.sqrt(np.square(half).mean()) for half in np.array_split(values, 2)]
    assert max(sizes) < 4 * min(sizes)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("fill", [0.0, 1e-45, 1.0, MAX, -MAX])
def test_any_parts_that_fit_the_schema_decode_to_finite_values(codec: Codec, fill: float) -> None:
    random = np.random.default_rng(6)
    parts: dict[str, Any] = {}
    schema = codec.schema(LAYOUT)
    try:
        spec = next(schema)
        while True:
            match spec:
                case Floats():
                    limit = 65504.0 if spec.dtype == "float16" else MAX
                    part: NDArray[Any] = np.full(
                        spec.count, np.clip(fill, max(spec.low, -limit), min(spec.high, limit))
                    )
                    part = part.astype(np.float32)
                case Symbols():
                    part = random.integers(0, spec.size, spec.count).astype(np.uint8)
                case Positions():
                    part = np.arange(spec.count, dtype=np.int64)
                case Count():
                    part = np.array(random.integers(0, spec.high, endpoint=True))
            parts[spec.name] = part
            spec = schema.send(part)
    except StopIteration:
        pass
    assert np.isfinite(codec.decode(parts, LAYOUT)).all()


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"rank": 65}, {"rank": True}, {"factors": 3}, {"rank": 1.5}])
@pytest.mark.parametrize("name", ["lowrank", "powersgd", "tensortrain"])
def test_bad_settings(name: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        fedcomp.from_config({"codec": name, **wrong})


def test_gentle_is_that_of_the_factors() -> None:
    assert LowRank(4).gentle is None
    assert LowRank(4, factors=fedcomp.TopK(0.01)).gentle == Uniform(4)
    assert PowerSGD(4, factors=Identity("float16")).gentle is None
