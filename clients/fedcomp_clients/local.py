"""Training a bundle on local .npy files, without a server: `fedcomp-client run`."""

import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, DataError
from fedcomp_clients.onnx_trainer import Evaluation, FitResult, OnnxTrainer

Array = NDArray[Any]


def train(told: Namespace) -> Iterator[str]:
    """Train as the arguments of `fedcomp-client run` say. Yields what there is to tell, line by line.

    Raises FedcompError for every mistake: of the bundle, the data, the arguments or the place to save to.
    """
    if (told.test_x is None) != (told.test_y is None):
        raise ConfigError("--test-x and --test-y belong together")
    if told.epochs < 1:
        raise ConfigError(f"--epochs: expected at least 1, got {told.epochs}")
    if told.out is not None and not told.out.parent.is_dir():
        raise ConfigError(f"--out: there is no folder {told.out.parent}")
    trainer = OnnxTrainer(told.bundle, threads=told.threads)
    if told.start is not None:
        trainer.load(told.start)
    x, y = _load(told.x), _load(told.y)
    test = None if told.test_x is None else (_load(told.test_x), _load(told.test_y))
    for epoch in range(told.epochs):
        began = time.perf_counter()
        result = trainer.fit(
            x,
            y,
            batch_size=told.batch_size,
            lr=told.lr,
            seed=_seed(told.seed, epoch),
            accumulate=told.accumulate,
            clip_norm=told.clip_norm,
            single=told.single,
        )
        work = f"{result.samples:,} samples in {result.steps:,} steps, {time.perf_counter() - began:.2f} s"
        yield f"epoch {epoch + 1}: {_said(result)}, {work}"
    if test is not None:
        evaluation = trainer.evaluate(*test)
        yield f"test: {_said(evaluation)}, {evaluation.samples:,} samples"
    if told.out is not None:
        trainer.save(told.out)
        yield f"saved {told.out}"


def _load(path: Path) -> Array:
    """The array in a file, mapped into memory."""
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read as a .npy file ({error})") from error
    if not isinstance(values, np.ndarray):
        values.close()
        raise DataError(f"{path} is an archive of arrays; expected one array, as np.save writes it")
    return values


def _seed(seed: int, epoch: int) -> int:
    if seed < 0:
        raise ConfigError(f"--seed: expected a whole number of at least 0, got {seed}")
    return int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])


def _said(result: FitResult | Evaluation) -> str:
    accuracy = "" if result.accuracy is None else f", accuracy {result.accuracy:.2%}"
    return f"loss {result.loss:.4f}{accuracy}"
