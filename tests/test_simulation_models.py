"""The networks: what they are fitted to, how they start, and how normalization is trained and averaged."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from fedcomp.errors import ConfigError
from fedcomp_simulations import apps, models
from fedcomp_simulations.apps import accuracy_of
from fedcomp_simulations.datasets.form import Form
from fedcomp_simulations.experiment import Experiment, Method
from fedcomp_simulations.models import Network
from fedcomp_simulations.sweep import run_experiment

pytestmark = pytest.mark.usefixtures("one_thread")

PIXELS, SERIES = Form((784,), 10), Form((6, 100), 7)
TEXT = Form((50,), 77, symbols=77, everywhere=True)


def size(network: Network | str) -> int:
    return sum(array.size for array in models.initial_arrays(network, 0).values())


# Start


@pytest.mark.parametrize(
    ("name", "parameters", "digest"),
    [
        ("cnn", 54_314, "d166778140fd3b2c"),
        ("gru", 41_533, "93cd7a9ce2be7b8c"),
        ("imu-cnn", 26_879, "6e41d0eecb58bef4"),
        ("mlp", 50_890, "b600f4585d5d8425"),
    ],
)
def test_networks_start_as_they_always_did(name: str, parameters: int, digest: str) -> None:
    arrays = models.initial_arrays(name, 0)
    assert size(name) == parameters
    found = hashlib.sha256()
    for key, values in arrays.items():
        found.update(key.encode())
        if key == "gru.weight_hh_l0":  # by LAPACK: its last bits hang on the machine
            values = np.zeros_like(values)
        found.update(values.tobytes())
    assert found.hexdigest()[:16] == digest


@pytest.mark.parametrize(
    ("network", "parameters"),
    [
        (Network("mlp", PIXELS, hidden=20), 15_910),
        (Network("mlp", Form((13, 32), 10)), 416 * 64 + 64 + 650),
        (Network("cnn", Form((3, 32, 32), 10)), 608 + 3_216 + 1024 * 64 + 64 + 650),
        (Network("cnn", Form((9, 7), 3)), 208 + 3_216 + 32 * 64 + 64 + 195),
        (Network("cnn", PIXELS, norm="group"), 54_314),
        (Network("cnn", PIXELS, norm="batch"), 54_314 + 2 * 48 + 2),
        (Network("cnn1d", SERIES, norm="batch"), 26_879 + 4 * 136 + 3),
        (Network("cnn1d", Form((13, 32), 10)), 26_879 + 7 * 24 * 7 + 3 * 65),
        (Network("gru", Form((20,), 4, symbols=30), hidden=8), 30 * 16 + 24 * (16 + 8 + 2) + 36),
        (Network("transformer", TEXT), 45_005),
        (Network("transformer", TEXT, hidden=32), 22_157 - 320),
    ],
)
def test_networks_are_fitted_to_the_data(network: Network, parameters: int) -> None:
    assert size(network) == parameters
    form = network.form
    x = torch.zeros(3, *form.shape, dtype=torch.int64 if form.symbols else torch.float32)
    model = models.build(network, models.initial_arrays(network, 0)).eval()
    with torch.inference_mode():
        fast = model(x)
    assert fast.shape == (3, *form.shape[:1], form.classes) if form.everywhere else (3, form.classes)
    torch.testing.assert_close(model(x), fast)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Network("best", PIXELS),
            "unknown model 'best'; available: cnn, cnn1d, gru, imu-cnn, mlp, transformer",
        ),
        (lambda: Network("cnn", PIXELS, norm="layer"), "unknown norm 'layer'; available: batch, group, none"),
        (lambda: Network("mlp", PIXELS, norm="group"), "norm: only the models cnn and cnn1d have .* not 'mlp'"),
        (lambda: Network("mlp", PIXELS, hidden=-1), "hidden: expected from 1 to 65536 units"),
        (lambda: Network("transformer", TEXT, hidden=36), "hidden: a transformer takes multiples of 8, got 36"),
        (
            lambda: Network("cnn", Form((13,), 2)),
            "takes images .* got features of shape 13 .* models for these data: mlp$",
        ),
        (lambda: Network("cnn", Form((3, 3, 9), 2)), "at least 4x4 pixels"),
        (lambda: Network("gru", PIXELS), "takes rows of symbols, got .*; models for these data: cnn, mlp$"),
        (
            lambda: Network("mlp", TEXT),
            "got rows of 50 of 77 symbols with a label at every position; .* gru, transformer",
        ),
        (lambda: Network("cnn1d", Form((6, 30), 2)), "at least 31 steps, got features of shape 6x30"),
        (lambda: Network("cnn1d", Form((6, 32), 2), norm="batch"), 'at least 35 steps with norm = "batch"'),
    ],
)
def test_networks_that_do_not_suit_the_data_are_refused(make: Callable[[], Network], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# Symbols


@pytest.mark.parametrize("name", ["gru", "transformer"])
def test_no_position_sees_what_follows(name: str) -> None:
    network = Network(name, TEXT)
    model = models.build(network, models.initial_arrays(network, 2))
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 77, (4, 50)))
    changed = x.clone()
    changed[:, 30:] = (changed[:, 30:] + 1) % 77
    with torch.inference_mode():
        scores, others = model(x), model(changed)
    torch.testing.assert_close(scores[:, :30], others[:, :30])
    assert (scores[:, 30:] - others[:, 30:]).abs().max() > 0.1
    last = models.build(replace(network, form=Form((50,), 77, symbols=77)), models.initial_arrays(network, 2))
    torch.testing.assert_close(last(x), scores[:, -1].clone())
    ours, theirs = (torch.autograd.grad(out.square().sum(), [*own.parameters()]) for own, out in pairs(last, model, x))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def pairs(last: nn.Module, everywhere: nn.Module, x: torch.Tensor) -> list[tuple[nn.Module, torch.Tensor]]:
    return [(last, last(x)), (everywhere, everywhere(x)[:, -1])]


# Normalization


def test_group_normalization_leaves_no_mean_and_no_statistics() -> None:
    network = Network("cnn", PIXELS, norm="group")
    arrays = models.initial_arrays(network, 0)
    assert list(arrays) == list(models.initial_arrays("cnn", 0))  # nothing more to send
    model = models.build(network, arrays)
    assert isinstance(model, models.Cnn)
    normalized = model.norm2(torch.randn(5, 16, 7, 7, generator=torch.Generator().manual_seed(0)) * 3 + 2)
    groups = normalized.detach().reshape(5, 8, -1)
    torch.testing.assert_close(groups.mean(dim=2), torch.zeros(5, 8), atol=1e-5, rtol=0)


def test_batch_normalization_starts_neutral_and_keeps_its_dtypes() -> None:
    network = Network("cnn1d", SERIES, norm="batch")
    arrays = models.initial_arrays(network, 0)
    assert arrays["norm1.num_batches_tracked"].dtype == np.int64
    assert all((arrays[key] == 1).all() for key in ("norm1.weight", "norm3.running_var"))
    assert not arrays["norm1.bias"].any()
    assert not arrays["norm1.running_mean"].any()
    widened = {key: array.astype(np.float64) for key, array in arrays.items()}  # as Flower's strategies do
    widened["norm1.num_batches_tracked"] = np.array(7.9)
    model = models.build(network, widened)
    state = model.state_dict()
    assert {value.dtype for value in state.values()} == {torch.float32, torch.int64}
    assert state["norm1.num_batches_tracked"] == 7
    assert model.training


NORMED = Experiment(
    name="normed",
    dataset="mnist",
    model="cnn",
    norm="batch",
    methods=(Method("float32", "float32"),),
    seeds=(0,),
    clients=20,
    clients_per_round=4,
    partition="iid",
    rounds=2,
    last=1,
)


def trained(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """The model of the last evaluation."""
    seen = []

    def note(experiment: Experiment, seed: int, arrays: ArrayRecord) -> float:
        seen.append(arrays)
        return accuracy_of(experiment, seed, arrays)

    monkeypatch.setattr(apps, "accuracy_of", note)
    run_experiment(experiment)
    return {key: array.numpy() for key, array in seen[-1].items()}


@pytest.mark.parametrize("method", [Method("float32", "float32"), Method("sign", "sign", "ef", downlink="uniform(8)")])
def test_running_statistics_are_trained_averaged_and_used(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(replace(NORMED, methods=(method,)), monkeypatch)
    assert model["norm1.num_batches_tracked"] == 20  # 200 samples a client in batches of 20, in each of two rounds
    assert model["norm2.running_var"].max() < 100
    assert model["norm2.running_var"].min() > 0
    assert np.abs(model["norm1.running_mean"]).max() > 0.01


def test_evaluation_does_not_hang_on_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = apps.to_record(models.initial_arrays(NORMED.network(), 0))
    whole = apps.accuracy_of(NORMED, 0, arrays)
    monkeypatch.setattr(apps, "EVALUATED_AT_ONCE", 7)
    assert apps.accuracy_of(NORMED, 0, arrays) == whole


def test_layers_without_normalization_are_not_in_the_state() -> None:
    model = models.build("cnn", models.initial_arrays("cnn", 0))
    assert isinstance(model.get_submodule("norm1"), nn.Identity)
    assert not any("norm" in key for key in model.state_dict())


# The user's own data


def test_an_experiment_on_a_file_trains_what_fits_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 120)
    x = (rng.normal(0, 0.3, (120, 3, 8, 8)) + np.eye(3)[y][:, :, None, None]).astype(np.float32)  # a colour a class
    np.savez(tmp_path / "own.npz", x=x, y=y, client=np.array([f"farm {index % 4}" for index in range(120)]))
    experiment = replace(
        NORMED,
        dataset=str(tmp_path / "own.npz"),
        norm="group",
        clients=4,
        clients_per_round=2,
        partition="natural",
        rounds=8,
        batch=8,
    )
    results = run_experiment(experiment)
    assert results.runs[0].accuracy_final > 0.8
    assert results.parameters == 608 + 3_216 + 64 * 64 + 64 + 195
    with pytest.raises(ConfigError, match="takes rows of symbols, got features of shape 3x8x8"):
        run_experiment(replace(experiment, model="gru", norm="none"))
