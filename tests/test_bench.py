"""`fedcomp bench`: inputs, rows, the contract of --json, mistakes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedcomp import ConfigError, Identity, Sign, Uniform, parse_codec
from fedcomp_simulations.bench import inputs
from fedcomp_simulations.bench.measure import measure, typical

KEYS = {
    "codec": str, "config": dict, "input": str, "n": int, "bits_per_parameter": float, "nmse": float,
    "nmse_scaled": float, "encode_mb_s": float, "decode_mb_s": float, "memcpy_mb_s": float, "unbiased": bool,
}  # fmt: skip


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedcomp_simulations.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", [n for n in inputs.names() if n.startswith("update")])
def test_updates_are_real_and_the_same_every_time(name: str) -> None:
    given, again = inputs.load(name), inputs.load(name)
    assert np.array_equal(given.x, again.x)
    assert given.layout.size == given.x.size > 30_000
    assert np.isfinite(given.x).all()
    assert 0 < np.abs(given.x).max() < 2


def test_update_mlp_is_the_published_recipe() -> None:
    assert inputs.load("update-mlp").x.size == 1_126_410


@pytest.mark.parametrize("name", ["gauss", "laplace", "student"])
def test_synthetic_inputs_have_the_size_asked_for(name: str) -> None:
    given = inputs.load(name, 5000)
    assert given.x.shape == (5000,)
    if name != "student":
        assert np.var(given.x) == pytest.approx(1, abs=0.1)


def test_rows_say_what_a_frame_costs() -> None:
    given = inputs.load("gauss", 20_000)
    row = measure(Sign(), given)
    assert 1 <= row.bits_per_parameter < 1.02
    assert row.nmse == pytest.approx(1 - 2 / np.pi, abs=0.02)
    assert row.nmse_scaled == pytest.approx(row.nmse, abs=1e-3)
    assert measure(Identity(), given).nmse == 0
    assert measure(Uniform(2, rounding="stochastic"), given).unbiased is True
    assert min(row.encode_mb_s, row.decode_mb_s, row.memcpy_mb_s) > 0


def test_every_registered_codec_has_a_typical_setting() -> None:
    import fedcomp

    assert {codec.name for codec in typical()} == set(fedcomp.registered())


def test_the_command_shows_a_table_and_keeps_the_contract(tmp_path: Path) -> None:
    np.save(tmp_path / "mine.npy", np.random.default_rng(0).standard_normal((30, 40)))
    done = bench(
        "--codec", "sign", "--codec", "uniform(2, rounding='stochastic')", "--input", "gauss", "--n", "3000",
        "--input", str(tmp_path / "mine.npy"), "--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "gauss: 3,000 values" in done.stdout
    rows = json.loads((tmp_path / "b.json").read_text())
    assert [(row["codec"], row["input"]) for row in rows] == [
        ("sign()", "gauss"), ("uniform(bits=2, rounding='stochastic')", "gauss"),
        ("sign()", "mine.npy"), ("uniform(bits=2, rounding='stochastic')", "mine.npy"),
    ]  # fmt: skip
    for row in rows:
        assert {key: type(value) for key, value in row.items()} == KEYS
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--input", "noise"], "unknown input 'noise'; available: gauss, laplace, student, update-cnn"),
        (["--input", "no.npy"], "cannot read no.npy"),
        (["--codec", "zip"], "unknown codec 'zip'"),
        (["--n", "0"], "--n: expected at least 1"),
        (["--json", "/dev/null/x.json"], "--json: cannot write"),
        (["--server", "--clients", "0"], "--clients: expected at least 1"),
        (["--server", "--device", "tpu"], "device: expected auto or one of cpu"),
        (["--server", "--peers"], "--server: cannot be combined with --input, --peers or --plot"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], match: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert match in done.stderr
    assert len(done.stderr.splitlines()) == 1


SERVER_KEYS = {
    "codec": str, "clients": int, "parameters": int, "device": str, "ms_per_reply": float, "flower_ms_per_reply": float,
    "speedup_vs_flower": float, "peak_bytes": int,
}  # fmt: skip


def test_the_server_is_measured_against_flower(tmp_path: Path) -> None:
    done = bench(
        "--server", "--clients", "11", "--n", "5003", "--codec", "topk(0.01)", "--codec", "lowrank(2)",
        "--device", "cpu", "--json", str(tmp_path / "s.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "server: 11 replies of 5,003 parameters, on cpu" in done.stdout
    rows = json.loads((tmp_path / "s.json").read_text())
    assert [row["codec"] for row in rows] == ["topk(fraction=0.01)", "lowrank(rank=2)"]
    for row in rows:
        assert {key: type(value) for key, value in row.items()} == SERVER_KEYS
        assert row["speedup_vs_flower"] == pytest.approx(row["flower_ms_per_reply"] / row["ms_per_reply"])
        assert row["peak_bytes"] > 2 * 4 * 5003


def test_the_servers_list_of_codecs_can_be_read() -> None:
    from fedcomp_simulations.bench.server import TYPICAL

    assert len({str(parse_codec(text)) for text in TYPICAL}) == len(TYPICAL)


@pytest.mark.parametrize("values", [np.array([1, np.nan]), np.array([1e300]), np.array(["a"]), np.zeros(0)])
def test_files_that_hold_no_finite_numbers(values: NDArray[Any], tmp_path: Path) -> None:
    np.save(tmp_path / "bad.npy", values)
    with pytest.raises(ConfigError, match="expected"):
        inputs.load(str(tmp_path / "bad.npy"))
