"""Running sums: numpy in chunks, torch on its CPU device, and what the names of devices stand for."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from codec_list import CODECS, IDS

from fedcomp import ECSQ, Codec, ConfigError, Layout, LowRank, Sign, Tensor, TopK, Uniform, generator
from fedcomp.blocks import CHUNK
from fedcomp.codec import Parts
from fedcomp.device import NumpySum, RunningSum, on_torch, resolve, running, running_sum
from fedcomp.device.on_torch import CpuSum, TorchSum
from fedcomp.layout import Vector
from fedcomp.terms import Levels, Product, Values

LAYOUT = Layout((Tensor("a", (40, 30)), Tensor("conv", (6, 4, 3, 3)), Tensor("empty", (0, 2)), Tensor("b", (37,))))


def every_sum(size: int) -> list[RunningSum]:
    return [NumpySum(size), CpuSum(size), TorchSum(size, "cpu")]


def updates(layout: Layout, clients: int) -> list[Vector]:
    found = []
    for client in range(clients):
        random = np.random.default_rng(client)
        x = (random.standard_normal(layout.size) ** 3).astype(np.float32)
        x[: layout.size // 5] = 0
        found.append(x)
    return found


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_all_sums_are_the_sum_of_what_is_decoded(codec: Codec) -> None:
    sums = every_sum(LAYOUT.size)
    expected = np.zeros(LAYOUT.size)
    for client, x in enumerate(updates(LAYOUT, 5)):
        parts, weight = codec.encode(x, LAYOUT, generator(0, 1, client)), 0.3 * client - 0.5
        decoded = codec.decode(parts, LAYOUT)
        expected += weight * decoded.astype(np.float64)
        bounds = [s.add(codec.terms(parts, LAYOUT), weight) for s in sums]
        assert len(set(bounds)) == 1
        assert bounds[0] >= np.abs(decoded).max() * 0.999999
    for total in (s.result() for s in sums):
        assert total.dtype == np.float32
        assert np.linalg.norm(total - expected) <= 1e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize("codec", [Sign(), Uniform(8), Uniform(5, affine=True), TopK(0.01), ECSQ(bits=0.1)], ids=str)
def test_vectors_of_several_chunks(codec: Codec) -> None:
    layout = Layout((Tensor("a", (9 * CHUNK + 13,)), Tensor("b", (3, 5)), Tensor("c", (CHUNK - 1,))))
    (x,) = updates(layout, 1)
    parts = codec.encode(x, layout, generator(0, 1, 0))
    decoded = codec.decode(parts, layout)
    for total in every_sum(layout.size):
        for weight in (0.7, 0.3):
            total.add(codec.terms(parts, layout), weight)
        assert np.allclose(total.result(), decoded, rtol=2e-6, atol=2e-6)
        assert total.result().tobytes() == total.result().tobytes()


def test_few_symbols_that_are_not_zero_are_added_alone() -> None:
    """At every place of a word of eight flags, and behind the last whole word."""
    q = np.ones(16 * 1024 + 5, np.uint8)
    q[np.arange(0, 1024, 33)] = 0
    q[-1] = 2
    table = np.array([-0.5, 0, 2], np.float32)
    total = NumpySum(q.size)
    total.add([Levels(slice(0, q.size), q, table)], 2.0)
    assert np.array_equal(total.result(), 2 * table[q])


def test_symbols_of_two_bytes() -> None:
    q = np.array([0, 40_000, 65_534, 7], np.uint16)
    table = np.arange(65_535, dtype=np.float32)
    for total in every_sum(4):
        total.add([Levels(slice(0, 4), q, table, even=True)], 0.5)
        assert np.allclose(total.result(), q / 2)


@pytest.mark.parametrize("total", every_sum(LAYOUT.size), ids=["numpy", "cpu", "torch"])
def test_products_wait_and_are_made_together(total: RunningSum, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in several blocks, flushes in between, a tensor that another one's values follow, and a plain term."""
    monkeypatch.setattr(running, "_BLOCK", 50)
    random, codec = np.random.default_rng(0), LowRank(2)
    expected = np.zeros(LAYOUT.size)
    for client in range(30):
        x = random.standard_normal(LAYOUT.size).astype(np.float32)
        parts = codec.encode(x, LAYOUT, generator(0, 1, client))
        terms = list(codec.terms(parts, LAYOUT))
        assert [type(term) for term in terms] == [Product, Product, Values]
        total.add(terms, client / 10)
        expected += client / 10 * codec.decode(parts, LAYOUT)
    assert np.linalg.norm(total.result() - expected) <= 1e-6 * np.linalg.norm(expected)


def test_a_product_beyond_the_limit_of_float32_is_clipped_like_its_decoded_tensor() -> None:
    codec, layout = LowRank(1), Layout((Tensor("a", (4, 6)),))
    parts: Parts = {"kept": np.ones(1, np.uint8), "factors.values": np.full(10, 3e19, np.float32)}
    total = NumpySum(layout.size)
    bound = total.add(codec.terms(parts, layout), 0.5)
    assert bound == np.finfo(np.float32).max
    assert np.array_equal(total.result(), codec.decode(parts, layout) / 2)


def test_names_of_devices() -> None:
    assert resolve("cpu") == "cpu"
    assert resolve("auto") == ("cuda:0" if torch.cuda.is_available() else "cpu")
    assert isinstance(running_sum(3, "cpu"), NumpySum)
    with pytest.raises(ConfigError, match=r"device: expected auto or one of cpu.*, got 'cuda:99'"):
        resolve("cuda:99")
    with pytest.raises(ConfigError, match="got 'tpu'"):
        resolve("tpu")


def test_torch_is_loaded_only_when_something_is_summed() -> None:
    code = "import sys, fedcomp, fedcomp.device; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_a_device_without_torch_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert resolve("auto") == "cpu"
    with pytest.raises(ConfigError, match="expected auto or one of cpu, got 'cuda'"):
        resolve("cuda")
    monkeypatch.delitem(sys.modules, "fedcomp.device.on_torch", raising=False)
    assert type(running_sum(3, "cpu")) is NumpySum


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_is_numpy_up_to_rounding() -> None:
    for codec in CODECS:
        sums = [NumpySum(LAYOUT.size), running_sum(LAYOUT.size, "cuda:0"), running_sum(LAYOUT.size, "cuda:0")]
        for client, x in enumerate(updates(LAYOUT, 3)):
            parts = codec.encode(x, LAYOUT, generator(0, 1, client))
            for total in sums:
                total.add(codec.terms(parts, LAYOUT), 0.4)
        ours, gpu, again = (total.result() for total in sums)
        assert np.linalg.norm(gpu - ours) <= 1e-6 * np.linalg.norm(ours)
        assert np.array_equal(gpu, again)


def test_no_bit_hangs_on_how_many_integers_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where other terms come in between."""
    layout = Layout((Tensor("a", (3 * CHUNK + 5,)), Tensor("b", (2000,))))
    frames = [
        (codec, codec.encode(x, layout, generator(0, 1, 0)))
        for codec in (Uniform(8), Sign(), Uniform(8, block=64))
        for x in updates(layout, 4)
    ]
    results = set()
    for waiting in (0.0, 0.7, 100.0):
        monkeypatch.setattr(on_torch, "_WAITING", waiting)
        monkeypatch.setattr(on_torch, "_CACHED", 1000 if waiting else 1 << 17)
        total = CpuSum(layout.size)
        for index, (codec, parts) in enumerate(frames):
            total.add(codec.terms(parts, layout), 0.1 + index)
        results.add(total.result().tobytes())
    assert len(results) == 1
