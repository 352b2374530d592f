"""Statistics of quantization error, at the client and at the server."""

from typing import Any

import numpy as np
import pytest
from flower_app import CLIENTS, run
from flwr.serverapp.strategy import FedAvg

from fedcomp.monitor import Monitor, TensorStats
from fedcomp.schedule import Schedule
from fedcomp_clients import CompressMod, MemoryStore
from fedcomp_strategies import Compressed


def observe(new: Any, decoded: Any = None, base: Any = None) -> list[TensorStats]:
    seen: list[TensorStats] = []
    Monitor(seen.append).observe(1, base or {"w": np.zeros_like(new)}, {"w": new}, decoded and {"w": decoded})
    return seen


def test_kurtosis_tells_outliers_from_noise() -> None:
    rng = np.random.default_rng(0)
    (gauss,), (laplace,) = observe(rng.standard_normal(200_000)), observe(rng.laplace(size=200_000))
    assert gauss.kurtosis == pytest.approx(3, abs=0.1)
    assert laplace.kurtosis == pytest.approx(6, abs=0.5)
    (constant,) = observe(np.ones(5))
    assert constant.kurtosis == 0
    (huge,) = observe(np.array([1e300, -1e300, 0, 0]))
    assert np.isfinite(huge.kurtosis)


def test_drift_is_the_change_of_scale_by_octaves() -> None:
    seen: list[TensorStats] = []
    monitor = Monitor(seen.append)
    for round_, scale in ((1, 1.0), (2, 4.0), (3, 0.0), (4, 1.0)):
        monitor.observe(round_, {"w": np.zeros(3)}, {"w": np.full(3, scale)})
    assert [s.drift for s in seen] == [0, 2, 0, 0]


def test_integers_and_empty_tensors_have_no_statistics() -> None:
    seen: list[TensorStats] = []
    base = {"n": np.array(1), "e": np.zeros((0, 3)), "w": np.zeros(2)}
    Monitor(seen.append).observe(1, base, base, base)
    assert [s.tensor for s in seen] == ["w"]


def test_mod_and_strategy_report_the_same_updates_from_their_side() -> None:
    client: list[TensorStats] = []
    server: list[TensorStats] = []
    strategy = Compressed(FedAvg(fraction_evaluate=0.0), uplink="uniform(3)", monitor=server.append)
    run(strategy, [CompressMod(MemoryStore(), monitor=client.append)], rounds=2)
    assert len(client) == len(server) == 2 * CLIENTS * 4
    weights = [s for s in client if s.tensor == "fc.weight"]
    assert all(s.nmse and 0 < s.nmse < 0.2 and s.cosine and s.cosine > 0.9 for s in weights)
    assert all(s.nmse is None and s.rms > 0 for s in server)


def test_a_schedule_changes_the_codec_between_rounds() -> None:
    schedule = Schedule.of([(1, "float32"), (2, "uniform(8)"), (3, "sign")], full_every=4)
    strategy = Compressed(FedAvg(fraction_evaluate=0.0), uplink=schedule, feedback="ef")
    run(strategy, [CompressMod(MemoryStore())], rounds=4)
    sizes = [t.bytes_up for t in strategy.traffic]
    assert sizes[0] > 2 * sizes[1] > 2 * sizes[2]
    assert abs(sizes[3] - sizes[0]) < 100
    assert not any(t.failures for t in strategy.traffic)
