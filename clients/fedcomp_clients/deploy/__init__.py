"""From a trained global model to what devices run: float32 and int8 models of plain ONNX, compared.

Needs onnx beside onnxruntime: `pip install "fedcomp[client,export]"`, on a server or workstation.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import BundleError, DataError
from fedcomp_clients.bundle import EVAL, Bundle, Data, read_bundle
from fedcomp_clients.deploy.graph import OUTPUT, Parameters, fitting, inference_model
from fedcomp_clients.deploy.measure import BATCHES, Report, Row, latency_ms, open_model, outputs, score

__all__ = ["DYNAMIC", "FLOAT32", "STATIC", "Report", "Row", "deploy"]

FLOAT32 = "model.onnx"
DYNAMIC = "model-int8-dynamic.onnx"
STATIC = "model-int8.onnx"

_SAME = 1e-4  # of the largest output: what merging a normalisation into a convolution may round
_UNCALIBRATED = f"{STATIC} left out: it needs inputs to calibrate with, a few hundred that are not tested on"


def deploy(
    bundle: Bundle | Path | str,
    parameters: Parameters,
    out: Path | str,
    *,
    calibration: NDArray[Any] | None = None,
    test: tuple[NDArray[Any], NDArray[Any]] | None = None,
    threads: int = 1,
) -> Report:
    """Write a trained model as float32, int8 with dynamic and, given `calibration`, int8 with static quantisation.

    All three map `x`, a batch of any size, to `output`, and need nothing but onnxruntime.

    Args:
        bundle: what the clients have trained, or its folder.
        parameters: the aggregated model: arrays by tensor name, or in the manifest's order.
        out: folder for the files; it is made. Nothing in it changes if anything fails.
        calibration: `(samples, ...)`: inputs that show in which ranges activations lie; some hundred are enough.
        test: `(x, y)` for the accuracies.
        threads: of the measured calls.

    Raises BundleError, LayoutError or NonFiniteError for a bundle or parameters that do not fit, DataError for data
    that do not, ModuleNotFoundError without onnx, OSError if a file cannot be written.
    """
    from fedcomp_clients.deploy.quantized import quantize_dynamic, quantize_static

    bundle = bundle if isinstance(bundle, Bundle) else read_bundle(bundle)
    manifest, folder = bundle.manifest, Path(out)
    samples = None if calibration is None else _inputs(calibration, manifest.x, "calibration x")
    tested = None if test is None else (_inputs(test[0], manifest.x, "test x"), np.asarray(test[1]))
    if tested is not None and len(tested[0]) != len(tested[1]):
        raise DataError(f"test: expected as many x as y, got {len(tested[0])} and {len(tested[1])}")
    example = np.zeros((1, *manifest.x.shape), manifest.x.dtype) if tested is None else tested[0]
    example = example if samples is None else samples
    model = inference_model(bundle, parameters)
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".deploy-", dir=folder) as scratch:  # on the same disk, to be moved at once
        made = Path(scratch)
        (made / FLOAT32).write_bytes(model.SerializeToString())
        _check_same(bundle, parameters, made / FLOAT32, example[: BATCHES[-1]])
        notes = [_write(made / DYNAMIC, example, partial(quantize_dynamic, model, made / DYNAMIC))]
        if samples is None:
            notes.append(_UNCALIBRATED)
        else:
            notes.append(_write(made / STATIC, example, partial(quantize_static, model, made / STATIC, samples)))
        files = [name for name in (FLOAT32, DYNAMIC, STATIC) if (made / name).exists()]
        rows = tuple(_measure(made / name, example, tested, manifest.task, threads) for name in files)
        for name in files:
            (made / name).replace(folder / name)
    measure = "squared error" if manifest.task == "regression" else "accuracy"
    return Report(folder, measure, rows, tuple(filter(None, notes)))


def _inputs(values: NDArray[Any], expected: Data, whose: str) -> NDArray[Any]:
    array = np.asarray(values)
    if array.shape[1:] != expected.shape or not len(array) or not np.can_cast(array.dtype, expected.dtype, "same_kind"):
        raise DataError(
            f"{whose}: expected at least one sample, {expected.dtype} of shape {('batch', *expected.shape)}, "
            f"got {array.dtype} of {array.shape}"
        )
    return array.astype(expected.dtype, copy=False)


def _check_same(bundle: Bundle, parameters: Parameters, path: Path, x: NDArray[Any]) -> None:
    """Raise BundleError unless the model says what the evaluation graph says."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(bundle.graph(EVAL), options, providers=["CPUExecutionProvider"])
    manifest = bundle.manifest
    feeds = {f"t/{name}": value for name, value in fitting(bundle, parameters).items()}
    feeds |= {"x": x, "y": np.zeros((len(x), *manifest.y.shape), manifest.y.dtype)}
    taken = {each.name for each in session.get_inputs()}
    (expected,) = session.run([OUTPUT], {name: value for name, value in feeds.items() if name in taken})
    found = outputs(open_model(path, 1), x)
    limit = _SAME * max(1.0, float(np.abs(expected).max(initial=0)))
    if found.shape != expected.shape or not np.abs(found - expected).max(initial=0) <= limit:
        raise BundleError(f"{EVAL}: the model made of it says something else; please report this")


def _write(path: Path, x: NDArray[Any], quantize: Callable[..., None]) -> str:
    """Quantise by channel or else, where onnxruntime cannot run that, as a whole. Returns "", or why neither works."""
    reason = ""
    for per_channel in (True, False):
        try:
            quantize(per_channel=per_channel)
            outputs(open_model(path, 1), x[:2])
        except Exception as error:  # they have no base in common
            reason = str(error).strip().partition("\n")[0]
        else:
            return ""
    path.unlink(missing_ok=True)
    return f"{path.name} left out: onnxruntime cannot quantise this model ({reason})"


def _measure(
    path: Path, example: NDArray[Any], test: tuple[NDArray[Any], NDArray[Any]] | None, task: str, threads: int
) -> Row:
    session = open_model(path, threads)
    right = None if test is None else score(outputs(session, test[0]), test[1], task)
    return Row(path.name, path.stat().st_size, right, latency_ms(session, example))
