"""Golden frames: every later version must decode what this one wrote.

A folder `golden/<name>/` holds config.json (the plan), base.npz and model.npz (what was sent and what was decoded then)
and the same update as a frame of each version that has been written: frame.bin of version 1, frame2.bin of version 2. A
missing config or model fails. `python tests/test_golden.py NAME...` writes new folders, never over an old one.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedcomp
from fedcomp import Plan

GOLDEN = Path(__file__).parent / "golden"

PLANS: dict[str, dict[str, Any]] = {
    "identity": {"codec": {"codec": "identity"}},
    "identity-float16": {"codec": {"codec": "identity", "dtype": "float16"}},
    "uniform": {"codec": {"codec": "uniform"}},
    "uniform-block": {"codec": {"codec": "uniform", "bits": 4, "block": 16}},
    "uniform-1-bit": {"codec": {"codec": "uniform", "bits": 1, "block": 32}},
    "uniform-affine": {"codec": {"codec": "uniform", "bits": 5, "affine": True, "rounding": "stochastic"}},
    "sign": {"codec": {"codec": "sign"}},
    "topk": {"codec": {"codec": "topk", "fraction": 0.02, "values": {"codec": "uniform"}}},
    "topk-dense": {"codec": {"codec": "topk", "fraction": 0.4, "scope": "tensor", "values": {"codec": "sign"}}},
    "vq": {"codec": {"codec": "vq", "dim": 2, "size": 16}},
    "vq-block": {"codec": {"codec": "vq", "dim": 4, "size": 300, "block": 16}},
    "rules": {"codec": {"codec": "sign"}, "rules": [["*.bias", {"codec": "uniform"}], ["fc2*", None]], "min_size": 0},
    "rules-by-kind": {
        "codec": {"codec": "sign"},
        "rules": [{"pattern": "*", "codec": None, "kind": "matrix", "max_size": 500}],
    },
    "qsgd": {"codec": {"codec": "qsgd", "levels": 4, "bucket": 100}},
    "terngrad": {"codec": {"codec": "terngrad"}},
    "noisysign": {"codec": {"codec": "noisysign"}},
    "log": {"codec": {"codec": "log", "block": 50}},
    "lloydmax": {"codec": {"codec": "lloydmax", "bits": 3}},
    "randk": {"codec": {"codec": "randk", "fraction": 0.1, "values": {"codec": "uniform", "bits": 4}}},
    "blocktopk": {"codec": {"codec": "blocktopk", "fraction": 0.1, "block": 8}},
    "threshold": {"codec": {"codec": "threshold", "tau": 2.0, "values": {"codec": "sign"}}},
    "stc": {"codec": {"codec": "stc", "fraction": 0.05}},
    "eden": {"codec": {"codec": "eden", "bits": 1.5}},
    "eden-sub-bit": {"codec": {"codec": "eden", "bits": 0.2, "scale": "mse", "rounds": 2}},
    "rvq": {"codec": {"codec": "rvq", "dim": 4, "size": 16}},
    "e8": {"codec": {"codec": "e8", "bits": 1.0}},
    "lowrank": {"codec": {"codec": "lowrank", "rank": 3, "factors": {"codec": "uniform"}}},
    "lrq": {"codec": {"codec": "lrq", "step": 0.5}},
    "lrq-factors": {"codec": {"codec": "lrq", "step": 1.0}},
    "powersgd": {"codec": {"codec": "powersgd", "rank": 3}},
    "tensortrain": {"codec": {"codec": "tensortrain", "rank": 3}},
    "sketch": {"codec": {"codec": "sketch", "ratio": 4.0, "keep": 0.2}},
    "ecsq": {"codec": {"codec": "ecsq", "bits": 1.0}},
    "ecsq-stochastic": {"codec": {"codec": "ecsq", "step": 0.5, "rounding": "stochastic"}},
    "trellis": {"codec": {"codec": "trellis", "bits": 1.0}},
    "auto": {"codec": {"codec": "auto", "budget": "800 B"}},
    "auto-factors": {"codec": {"codec": "auto", "budget": "900 B"}},
    "auto-rests": {"codec": {"codec": "auto", "budget": "2.5 kB"}},
    "auto-eden": {"codec": {"codec": "auto", "budget": "260 B", "unbiased": True}},
    "auto-turned": {"codec": {"codec": "auto", "budget": "100 B", "unbiased": True}},
    "auto-stochastic": {"codec": {"codec": "auto", "budget": "2 kB", "unbiased": True}},
    "auto-raw": {"codec": {"codec": "auto", "budget": "20 kB"}},
    "eden-compact": {"codec": {"codec": "eden", "bits": 0.5, "compact": True}},
}

PLATFORM_BOUND = {
    "auto", "vq", "rvq", "eden", "e8", "lowrank", "lrq", "powersgd", "tensortrain", "lloydmax", "log", "ecsq",
    "trellis",
}  # fmt: skip
PLATFORM_FREE = [name for name, plan in PLANS.items() if plan["codec"]["codec"] not in PLATFORM_BOUND]
"""Those whose encoder hangs on no matrix product, logarithm or near-tie of a machine's own."""


def example() -> tuple[dict[str, Any], dict[str, Any]]:
    """A model before and after training: heavy tails, a dead row, integers, and dtypes that change on the way."""
    random = np.random.default_rng(2026)
    base: dict[str, Any] = {
        "fc1.weight": random.standard_normal((50, 40)).astype(np.float32),
        "fc1.bias": np.zeros(40, np.float32),
        "fc2.weight": random.standard_normal((40, 3)),
        "bn.running_var": np.ones(40, np.float32),
        "steps": np.array(3.0),
    }
    new = {n: np.asarray((a + random.standard_normal(a.shape) ** 3 / 50).astype(np.float32)) for n, a in base.items()}
    new["fc1.weight"][:10] = base["fc1.weight"][:10]
    new["steps"] = np.array(4)
    return base, new


def factored_example() -> tuple[dict[str, Any], dict[str, Any]]:
    """Layers of low rank, high, wide and convolutional, and a large one without structure, for lrq."""
    random = np.random.default_rng(2027)
    shapes = {"high": (60, 20), "wide": (20, 60), "conv": (8, 6, 3, 3), "noise": (70, 70), "bias": (30,)}
    base: dict[str, Any] = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    new = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name in ("high", "wide"):
        new[name] = (new[name][:, :2] @ new[name][:2]).astype(np.float32)
    new["conv"] = np.einsum("oh,iw->oihw", new["conv"][:, 0, :, 0], new["conv"][:6, 1, 0]).astype(np.float32)
    return base, new


def noisy_example() -> tuple[dict[str, Any], dict[str, Any]]:
    """Layers of low rank below noise, one of them large, of which factors leave something."""
    random = np.random.default_rng(2028)
    base: dict[str, Any] = {"large": np.zeros((90, 80), np.float32), "small": np.zeros((30, 40), np.float32)}
    new = {}
    for name, values in base.items():
        rows, columns = values.shape
        structure = random.standard_normal((rows, 2)) @ random.standard_normal((2, columns))
        new[name] = (structure + 0.05 * random.standard_t(3, values.shape)).astype(np.float32)
    return base, new


def spike_example() -> tuple[dict[str, Any], dict[str, Any]]:
    """One value that dominates all others."""
    base: dict[str, Any] = {"w": np.zeros((60, 50), np.float32)}
    new = {"w": np.random.default_rng(2029).standard_normal((60, 50)).astype(np.float32)}
    new["w"][7, 7] = 200
    return base, new


EXAMPLES = {
    "lrq-factors": factored_example,
    "auto-factors": factored_example,
    "auto-rests": noisy_example,
    "auto-turned": spike_example,
}


def write(name: str) -> None:
    folder = GOLDEN / name
    folder.mkdir(parents=True)
    plan, (base, new) = Plan.from_config(PLANS[name]), EXAMPLES.get(name, example)()
    frame = fedcomp.compress(base, new, plan, round=5, rng=fedcomp.generator(1, 5, 3)).frame
    (folder / "config.json").write_text(json.dumps(PLANS[name]) + "\n")
    (folder / "frame2.bin").write_bytes(frame)
    np.savez_compressed(folder / "base.npz", **base)
    model: dict[str, Any] = {**fedcomp.decompress(frame, base)}
    np.savez_compressed(folder / "model.npz", **model)


@pytest.mark.parametrize("name", PLANS)
def test_golden_frames_still_decode(name: str) -> None:
    """c34 c35"""
    folder = GOLDEN / name
    plan = Plan.from_config(json.loads((folder / "config.json").read_text()))
    with np.load(folder / "base.npz") as base, np.load(folder / "model.npz") as expected:
        frames = [path.read_bytes() for path in sorted(folder.glob("frame*.bin"))]
        assert frames
        for frame in frames:
            model = fedcomp.decompress(frame, dict(base), plan=plan, round=5)
            assert list(model) == list(expected)
            for tensor in expected:
                assert model[tensor].dtype == expected[tensor].dtype
                assert np.array_equal(model[tensor], expected[tensor]), tensor


def test_every_codec_has_a_golden_frame() -> None:
    found = {json.loads((folder / "config.json").read_text())["codec"]["codec"] for folder in GOLDEN.iterdir()}
    assert found >= set(fedcomp.registered())


@pytest.mark.parametrize("name", PLATFORM_FREE)
def test_the_same_inputs_still_give_the_golden_bytes(name: str) -> None:
    base, new = example()
    plan = Plan.from_config(PLANS[name])
    frame = fedcomp.compress(base, new, plan, round=5, rng=fedcomp.generator(1, 5, 3)).frame
    assert frame == (GOLDEN / name / "frame2.bin").read_bytes()


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        write(wanted)
