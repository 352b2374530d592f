"""The files for a Raspberry Pi: what can be checked of them without one."""

import importlib.util
import re
import shutil
import subprocess
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, Metadata, RecordDict
from flwr.common.config import parse_config_args

from fedcomp_clients import initial_arrays, read_bundle
from fedcomp_clients.doctor import SAMPLE

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "raspberry-pi"
UNIT = FOLDER / "fedcomp-supernode.service"


def variables() -> dict[str, str]:
    """Of supernode.env, which has single quotes as its only quotation."""
    lines = (FOLDER / "supernode.env").read_text().splitlines()
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: value.removeprefix("'").removesuffix("'") for name, _, value in pairs}


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    copy = tmp_path / UNIT.name
    copy.write_text(re.sub(r"(?<==)/opt/fedcomp/bin/\S+ ", "/bin/true ", UNIT.read_text()))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_uses_all_variables_of_its_file_and_no_others() -> None:
    told = re.findall(r"\$\{(\w+)\}", UNIT.read_text())
    assert set(told) == set(variables())


def test_flower_understands_the_node_config() -> None:
    told = parse_config_args([variables()["NODE_CONFIG"]])
    assert told["partition-id"] == 7
    assert told["fedcomp-budget"] == "2 kB"
    assert told["bundle"] == variables()["BUNDLE"]


def test_the_image_copies_what_is_there() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    sources = [word for words in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE) for word in words.split()]
    assert sources
    assert all((ROOT / source).exists() for source in sources)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {package.partition("/")[0] for package in settings["packages"]} <= set(sources)


def test_the_client_app_trains_a_bundle_on_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCOMP_STATE_DIR", str(tmp_path / "state"))
    spec = importlib.util.spec_from_file_location("edge_example", FOLDER / "client_app.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    x = read_bundle(SAMPLE).manifest.x
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(40, *x.shape)).astype(x.dtype))
    np.save(tmp_path / "y.npy", np.arange(40) % 2)

    content = RecordDict({"arrays": initial_arrays(SAMPLE), "config": ConfigRecord({"server-round": 1})})
    told = Metadata(1, "1", 0, 1, "", "", created_at=time.time(), ttl=60, message_type="train")
    node: dict[str, bool | float | int | str] = {"partition-id": 7, "bundle": str(SAMPLE), "data": str(tmp_path)}
    message: Message = Message(content, metadata=told)  # type: ignore[call-overload]
    reply = example.app(message, Context(1, 1, node, RecordDict(), {}))
    assert not reply.has_error(), reply.error.reason
    (metrics,) = reply.content.metric_records.values()
    assert metrics["num-examples"] == 40
    (arrays,) = reply.content.array_records.values()
    bundle = read_bundle(SAMPLE)
    for tensor in bundle.manifest.named("parameter"):
        assert (arrays[tensor.name].numpy() != bundle.initial[tensor.name]).any()
