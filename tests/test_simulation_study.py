"""Grids: which experiments and methods a file stands for, and what is said about mistakes in it."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedcomp.errors import ConfigError
from fedcomp_simulations.config import from_config, to_config
from fedcomp_simulations.experiment import Experiment, Method
from fedcomp_simulations.study import Study, load_study, parse_study, shipped

BASE = """
dataset = "mnist"
model = "mlp"
clients = 20
seeds = [0, 1]
[[methods]]
name = "float32"
codec = "float32"
[[methods]]
name = "sign"
codec = "sign"
"""


def parse(text: str, *changes: str, grid: tuple[str, ...] = ()) -> Study:
    return parse_study(text, name="base", source="base.toml", changes=changes, grid=grid)


def test_without_a_grid_there_is_one_unnamed_point() -> None:
    study = parse(BASE)
    (point,) = study.points
    assert (point.name, point.grid, point.experiment.name, study.runs) == ("", {}, "base", 4)


def test_a_grid_makes_every_combination_in_order() -> None:
    study = parse(BASE + "[grid]\nalpha = [0.1, 1]\nstrategy_options.server_momentum = [0.5, 0.9]", "strategy=fedavgm")
    assert [point.name for point in study.points] == [
        "alpha=0.1, strategy_options.server_momentum=0.5",
        "alpha=0.1, strategy_options.server_momentum=0.9",
        "alpha=1, strategy_options.server_momentum=0.5",
        "alpha=1, strategy_options.server_momentum=0.9",
    ]
    last = study.points[-1]
    assert last.grid == {"alpha": 1, "strategy_options.server_momentum": 0.9}
    assert (last.experiment.alpha, last.experiment.strategy_options) == (1.0, {"server_momentum": 0.9})
    assert study.runs == 16


def test_a_key_of_every_method_can_vary() -> None:
    study = parse(BASE, grid=("methods.downlink=pack,uniform(8)",))
    downlinks = [[method.downlink for method in point.experiment.methods] for point in study.points]
    assert downlinks == [["pack", "pack"], ["uniform(8)", "uniform(8)"]]


def test_a_method_has_a_grid_of_its_own() -> None:
    text = """
[[methods]]
name = "auto {budget}"
codec = "auto"
grid = { budget = ["640 B", "190 B"], feedback = ["none", "auto"] }
"""
    (point,) = parse(BASE + text).points
    *_, a, b, c, d = point.experiment.methods
    assert [method.name for method in (a, b, c, d)] == [
        "auto 640 B, feedback=none",
        "auto 640 B, feedback=auto",
        "auto 190 B, feedback=none",
        "auto 190 B, feedback=auto",
    ]
    assert d == Method("auto 190 B, feedback=auto", "auto", "auto", budget="190 B")


def test_options_change_keys() -> None:
    study = parse(
        BASE, "lr = 0.5", "partition=iid", "strategy_options={}", grid=("batch=10,20", "model = 'cnn', 'mlp'")
    )
    assert [point.name for point in study.points][1] == "batch=10, model=mlp"
    assert {point.experiment.lr for point in study.points} == {0.5}
    assert {point.experiment.partition for point in study.points} == {"iid"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[grid]\nalpa = [1]", "unknown key 'alpa'; available: .*alpha.* \\(where alpa=1\\)"),
        ("[grid]\nalpha = [1, 0]", "alpha: expected a finite number above 0, got 0.0 \\(where alpha=0\\)"),
        ("[grid]\nalpha = 1", "grid: alpha: expected a list of values, got 1"),
        ("[grid]\nalpha = []", "grid: alpha: expected a list of values"),
        ("[grid]\nalpha = [1, 1]", "grid: alpha: a value is there twice"),
        ("[grid]\nseeds = [[1], [2]]", "grid: seeds cannot be varied here"),
        ("[grid]\nmethods.bits = [1]", "methods, entry 1: unknown key 'bits'"),
        ("[grid]\nalpha.x = [1]\n", "alpha: expected a number, got {'x': 1}"),
        ("[grid]\nlr.x = [1]\nbatch = [2]", "lr"),
        ('[[methods]]\nname = "x"\ncodec = "sign"\ngrid = 3', "grid of method 'x': expected a table of lists, got 3"),
        ('[[methods]]\nname = "x"\ncodec = "sign"\ngrid = {bits = [1]}', "methods, entry 3: unknown key 'bits'"),
        ('[[methods]]\nname = "x"\ncodec = "sign"\ngrid = {name = ["a"]}', "name cannot be varied here"),
        (f"[grid]\nalpha = {list(range(1, 200))}\nlr = {list(range(1, 200))}", "39,601 combinations are more than"),
        (f"[grid]\nalpha = {list(range(1, 3000))}", "the grid makes 11,996 runs, more than 10,000"),
    ],
)
def test_mistakes_name_the_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^base\.toml: .*{message}"):
        parse(BASE + text)


@pytest.mark.parametrize(
    ("changes", "grid", "message"),
    [
        (("lr",), (), "--set: expected key=value, got 'lr'"),
        (("lr=",), (), "--set: expected key=value, got 'lr='"),
        (("lr.x=1",), (), "lr: expected a number, got {'x': 1}"),
        (("batch=2.5",), (), "batch: expected a whole number, got 2.5"),
        (("lr=0.1", "lr.x=1"), (), "lr.x: expected a table 'lr', got 0.1"),
        ((), ("=3",), "--grid: expected key=value,value, got '=3'"),
    ],
)
def test_mistakes_in_options_are_named(changes: tuple[str, ...], grid: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(BASE, *changes, grid=grid)


@pytest.mark.parametrize("name", shipped())
def test_settings_come_back(name: str) -> None:
    for point in load_study(name).points:
        table = to_config(point.experiment)
        assert from_config(table, Experiment) == point.experiment
        changed = replace(point.experiment, clip_norm=float("inf"), momentum=0.5)
        assert from_config(to_config(changed, skip=("name",)), Experiment, name=name) == changed


def test_values_that_look_alike_are_points_of_their_own() -> None:
    study = parse(BASE, grid=("lr=0.1000001,0.1000002,0.5", "alpha=1000000.5,2"))
    names = [point.name for point in study.points]
    assert names[::2] == ["lr=0.1000001, alpha=1000000.5", "lr=0.1000002, alpha=1000000.5", "lr=0.5, alpha=1000000.5"]
    assert len(set(names)) == 6


def test_float32_is_the_twin_whatever_becomes_of_small_tensors() -> None:
    (point,) = parse(BASE, "methods.gentle_share=0.1", "methods.min_size=0").points
    assert [method.uncompressed for method in point.experiment.methods] == [True, False]


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "base.toml"
    path.write_bytes(b"\xef\xbb\xbf" + BASE.encode())
    assert load_study(str(path)) == parse(BASE)
