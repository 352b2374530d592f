"""One measurement of a training step in a process of its own, whose peak memory counts.

    python -m fedcomp_simulations.bench.steps onnxruntime BUNDLE DATA.npz
    python -m fedcomp_simulations.bench.steps torch FAMILY DATA.npz

Both load Flower, as a client does, use one thread, and print JSON: milliseconds of a step, and peak memory in bytes.
"""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flwr.clientapp  # noqa: F401
import numpy as np
from numpy.typing import NDArray

BATCH = 32
STEPS = 8
REPEATS = 12
RATE = 0.01


def main(engine: str, what: str, data: str) -> None:
    """Measure and print."""
    with np.load(data, allow_pickle=False) as arrays:
        x, y = arrays["x"], arrays["y"]
    epoch = _onnxruntime(what, x, y) if engine == "onnxruntime" else _torch(what, x, y)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        epoch()
        times.append((time.perf_counter() - start) / (len(x) // BATCH))
    peak = _peak_bytes()
    engines = {"torch", "onnx", "onnxruntime"} & sys.modules.keys()
    print(json.dumps({"step_ms": min(times) * 1000, "peak_bytes": peak, "loaded": sorted(engines)}))


def _peak_bytes() -> int:
    """Most memory that this process has had. What getrusage tells would include the parent's, before exec."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def _onnxruntime(folder: str, x: NDArray[Any], y: NDArray[Any]) -> Callable[[], None]:
    from fedcomp_clients.onnx_trainer import OnnxTrainer

    trainer = OnnxTrainer(folder, threads=1)

    def epoch() -> None:
        trainer.fit(x, y, batch_size=BATCH, lr=RATE, shuffle=False)

    return epoch


def _torch(name: str, x: NDArray[Any], y: NDArray[Any]) -> Callable[[], None]:
    import torch

    from fedcomp_clients.export.model import named_loss
    from fedcomp_simulations.bench.families import family

    torch.set_num_threads(1)
    given = family(name, BATCH)
    loss, model = named_loss(given.loss), given.model
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    xs, ys = torch.from_numpy(x), torch.from_numpy(y)

    def epoch() -> None:
        for start in range(0, len(xs), BATCH):
            optimizer.zero_grad()
            loss(model(xs[start : start + BATCH]), ys[start : start + BATCH]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return epoch


if __name__ == "__main__":
    main(*sys.argv[1:])
