"""Whether a device can train and upload: `fedcomp-client doctor`."""

import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fedcomp
from fedcomp.errors import FedcompError
from fedcomp_clients.bundle import TRAIN, Data, Manifest
from fedcomp_clients.files import state_directory

SAMPLE = Path(__file__).parent / "sample"
"""A perceptron of 4,810 parameters that comes with fedcomp."""

NEEDED = {"numpy": ("numpy", (1, 26)), "flwr": ("flwr.clientapp", (1, 42)), "onnxruntime": ("onnxruntime", (1, 23))}
"""Packages, what of them is used, and the oldest version that will do."""

_BATCH = 32
_TIMED_S = 0.5
_LOW_MEMORY = 128 << 20
_LOW_DISK = 64 << 20
_LARGEST_DIFFERENCE = 1e-3
_INSTALL = 'run: pip install -U "fedcomp[client]"'


@dataclass(frozen=True)
class Finding:
    """What one check found; `remedy` says what to do if it is not ok."""

    ok: bool
    name: str
    found: str
    remedy: str = ""

    def line(self) -> str:
        """One line for people."""
        told = f"{'ok  ' if self.ok else 'FAIL'}  {self.name:<13} {' '.join(self.found.split())}"
        return told if self.ok else f"{told}; {self.remedy}"


def examine(bundle: Path | None = None, state: Path | None = None, *, threads: int = 1) -> Iterator[Finding]:
    """Check one thing after the other.

    Args:
        bundle: whose training step is timed; None: a tiny one.
        state: directory for what is kept between rounds; None: where clients keep it.
        threads: that an operator may use.
    """
    yield _python()
    yield Finding(True, "machine", f"{platform.machine()}, {platform.system()} {platform.release()}, {_cpus()} CPUs")
    yield Finding(True, "fedcomp", fedcomp.__version__)
    for package in NEEDED:
        yield _package(package)
    yield _memory()
    yield _state(state_directory(state))
    for name, check in (("training step", _step), ("gradients", _gradients), ("encode", _encode)):
        yield _guarded(name, check, bundle or SAMPLE, threads)


def _python() -> Finding:
    found = f"{platform.python_version()}, {'64' if sys.maxsize > 1 << 32 else '32'} bit"
    good = sys.version_info >= (3, 11) and sys.maxsize > 1 << 32
    return Finding(
        good, "Python", found, "install a 64-bit system with Python 3.11 or later; there are no others' wheels"
    )


def _package(name: str) -> Finding:
    module, oldest = NEEDED[name]
    try:
        found = version(name)
        import_module(module)
    except PackageNotFoundError:
        return Finding(False, name, "is not installed", _INSTALL)
    except Exception as error:  # whatever a broken installation raises
        return Finding(False, name, f"cannot be imported ({type(error).__name__}: {error})", _INSTALL)
    good = tuple(int(part) for part in re.findall(r"\d+", found)[:2]) >= oldest
    return Finding(good, name, found, f"version {'.'.join(map(str, oldest))} or later is needed; {_INSTALL}")


def _memory() -> Finding:
    """Memory of the machine, of Linux only."""
    try:
        told = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (int(told[key].split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError, IndexError):
        return Finding(True, "memory", "unknown")
    found = f"{free >> 20:,} MB free of {total >> 20:,} MB"
    return Finding(
        free >= _LOW_MEMORY, "memory", found, f"at least {_LOW_MEMORY >> 20} MB are needed; stop other programs"
    )


def _state(directory: Path) -> Finding:
    """Whether something can be written there, and how much."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(directory).free
    except OSError as error:
        remedy = "free some space, or set FEDCOMP_STATE_DIR to a directory that this user can write to"
        return Finding(False, "state", f"{directory} cannot be written ({error.strerror})", remedy)
    found = f"{directory}, {free >> 20:,} MB free"
    return Finding(free >= _LOW_DISK, "state", found, f"at least {_LOW_DISK >> 20} MB are needed; free some space")


def _guarded(name: str, check: Callable[[Path, int], Finding], bundle: Path, threads: int) -> Finding:
    try:
        return check(bundle, threads)
    except FedcompError as error:
        return Finding(False, name, str(error), "see above")
    except ImportError as error:
        return Finding(False, name, f"not tried ({error})", _INSTALL)


def _step(folder: Path, threads: int) -> Finding:
    """Time of a training step."""
    from fedcomp_clients.onnx_trainer import OnnxTrainer

    trainer = OnnxTrainer(folder, threads=threads)
    x, y = _samples(trainer.manifest)
    trainer.fit(x, y, batch_size=_BATCH, lr=0.0)
    times: list[float] = []
    while sum(times) < _TIMED_S and len(times) < 200:
        began = time.perf_counter()
        trainer.fit(x, y, batch_size=_BATCH, lr=0.0, seed=None)
        times.append(time.perf_counter() - began)
    size = sum(values.size for values in trainer.get_parameters().values())
    found = (
        f"{statistics.median(times) * 1e3:.2f} ms for {_BATCH} samples, {_which(folder)} of {size:,} values{_peak()}"
    )
    return Finding(True, "training step", found)


def _gradients(folder: Path, threads: int) -> Finding:
    """Whether this onnxruntime's optimizations leave the gradients alone; some versions have faults there."""
    from fedcomp_clients.onnx_session import Graph
    from fedcomp_clients.onnx_trainer import OnnxTrainer

    trainer = OnnxTrainer(folder, threads=threads)
    manifest = trainer.manifest
    if manifest.random:
        return Finding(True, "gradients", "not compared: the model draws random numbers")
    x, y = _samples(manifest)
    names = [f"g/{tensor.name}" for tensor in manifest.named("parameter")]
    fast, plain = (
        Graph(trainer.bundle, TRAIN, threads=threads, optimize=optimize).run(names, trainer.get_parameters(), x, y)
        for optimize in (True, False)
    )
    scale = max(float(np.abs(values).max(initial=0)) for values in plain) or 1.0
    worst = max(float(np.abs(a - b).max(initial=0)) for a, b in zip(fast, plain, strict=True)) / scale
    found = f"differ by {worst:.1e} of the largest with and without onnxruntime's optimizations"
    return Finding(
        worst <= _LARGEST_DIFFERENCE, "gradients", found, "use another version of onnxruntime, and report this"
    )


def _encode(folder: Path, threads: int) -> Finding:
    """Time to compress an update of the model."""
    from fedcomp import Plan, compress, generator, parse_codec
    from fedcomp_clients.bundle import read_bundle

    start = dict(read_bundle(folder).initial)
    random = np.random.default_rng(0)
    trained = {
        name: values + random.normal(0, 0.01, values.shape).astype(values.dtype) if values.dtype.kind == "f" else values
        for name, values in start.items()
    }
    plan, times = Plan(parse_codec("uniform(8)")), []
    for _ in range(3):
        began = time.perf_counter()
        frame = compress(start, trained, plan, round=1, rng=generator(0, 1, 0)).frame
        times.append(time.perf_counter() - began)
    plain = sum(values.nbytes for values in start.values())
    found = f"{min(times) * 1e3:.2f} ms, {len(frame):,} bytes instead of {plain:,} (uniform(8), {_which(folder)})"
    return Finding(True, "encode", found)


def _samples(manifest: Manifest) -> tuple[NDArray[Any], NDArray[Any]]:
    """A batch of noise; integers are labels where their number is known, else zeros, which every model knows."""
    random = np.random.default_rng(0)

    def noise(data: Data, end: int) -> NDArray[Any]:
        shape = (_BATCH, *data.shape)
        values = random.standard_normal(shape) if data.dtype.startswith("float") else random.integers(0, end, shape)
        return np.asarray(values, data.dtype)

    return noise(manifest.x, 1), noise(manifest.y, manifest.classes or 1)


def _which(folder: Path) -> str:
    return "a sample model" if folder == SAMPLE else str(folder)


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _peak() -> str:
    """The most memory that this process has had, flwr included; "" where there is no way to tell."""
    try:
        import resource
    except ImportError:
        return ""
    unit = 1 if sys.platform == "darwin" else 1 << 10
    return f", peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit >> 20} MB"
