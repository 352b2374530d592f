"""`fedcomp export` on the command line."""

import sys
from pathlib import Path

import pytest

from fedcomp_clients.bundle import read_bundle
from fedcomp_clients.export import SGD
from fedcomp_simulations.cli import main

MODULE = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

def make():
    return net

def needy(argument):
    return net

def loss(output, y):
    return ((output - y) ** 2).mean()

example = torch.randn(4, 6), torch.randint(3, (4,))
numbers = [1, 2]
branch = nn.Sequential(net, nn.Identity())
branch[1].forward = lambda x: x if x.sum() > 0 else -x
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("own_nets.py").write_text(MODULE)
    Path("broken_nets.py").write_text("1 / 0")
    monkeypatch.delitem(sys.modules, "own_nets", raising=False)
    return tmp_path


def test_the_command_exports(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--x-shape", "6", "--out", "bundle", "--momentum", "0.9", "--weight-decay", "1e-4", "--nesterov"]
    assert main(["export", "own_nets:make", *options]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.startswith("bundle: 4 tensors, ")
    assert "differs from torch by " in captured.out
    manifest = read_bundle(here / "bundle").manifest
    assert manifest.optimizer == SGD(0.9, 1e-4, True)
    assert (manifest.x.shape, manifest.y.shape, manifest.classes) == ((6,), (), 3)


COMMANDS: dict[str, tuple[list[str], str]] = {
    "no colon": (["own_nets", "--x-shape", "6"], "MODEL: expected module:name, got 'own_nets'"),
    "no module": (["unknown_nets:net", "--x-shape", "6"], "there is no module 'unknown_nets'"),
    "no name": (["own_nets:nest", "--x-shape", "6"], "has no attribute 'nest'"),
    "broken": (["broken_nets:net", "--x-shape", "6"], "broken_nets cannot be imported: ZeroDivisionError"),
    "no model": (
        ["own_nets:numbers", "--x-shape", "6"],
        "expected a torch module or a function that makes one, got list",
    ),
    "arguments": (["own_nets:needy", "--x-shape", "6"], "needy() fails: TypeError"),
    "no shapes": (["own_nets:net"], "expected either --example or --x-shape"),
    "bad shape": (["own_nets:net", "--x-shape", "6,6"], "--x-shape: expected sides such as \"1x28x28\", got '6,6'"),
    "wrong shape": (["own_nets:net", "--x-shape", "7"], "the model fails on x of shape (8, 7)"),
    "own loss": (["own_nets:net", "--x-shape", "6", "--loss", "own_nets:loss"], "pass --example"),
    "unknown loss": (["own_nets:net", "--x-shape", "6", "--loss", "hinge"], "--loss: expected cross_entropy, mse"),
    "example": (
        ["own_nets:net", "--example", "own_nets:numbers"],
        "example: expected a tensor of samples for x, got int",
    ),
    "branch": (["own_nets:branch", "--example", "own_nets:example"], "depends on values of tensors"),
    "momentum": (["own_nets:net", "--x-shape", "6", "--momentum", "1"], "0 <= momentum < 1"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_mistakes_at_the_command_are_one_line(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = COMMANDS[case]
    assert main(["export", *arguments, "--out", "bundle"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert not (here / "bundle").exists()
