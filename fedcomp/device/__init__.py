"""Where the server sums: numpy on one core, or torch on a GPU. The only place of the core that may import torch."""

from fedcomp.device.running import NumpySum, RunningSum
from fedcomp.errors import ConfigError

__all__ = ["NumpySum", "RunningSum", "resolve", "running_sum"]


def resolve(device: str) -> str:
    """The device that a name stands for: "cpu", "cuda:0" and so on, or "mps".

    "auto" is the first GPU that torch can use with CUDA, and otherwise the CPU. Raises ConfigError, naming what there
    is, for a device that is unknown or not there.
    """
    there = ["cpu", *_accelerators()]
    if device == "auto":
        return next((name for name in there if name.startswith("cuda")), "cpu")
    wanted = "cuda:0" if device == "cuda" else device
    if wanted not in there:
        raise ConfigError(f"device: expected auto or one of {', '.join(there)}, got {device!r}")
    return wanted


def running_sum(size: int, device: str) -> RunningSum:
    """An empty sum of vectors of `size` values on a device that `resolve` returned."""
    try:
        from fedcomp.device.on_torch import CpuSum, TorchSum
    except ImportError:
        return NumpySum(size)
    return CpuSum(size) if device == "cpu" else TorchSum(size, device)


def _accelerators() -> list[str]:
    try:
        import torch
    except ImportError:
        return []
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return [*cuda, "mps"] if torch.backends.mps.is_available() else cuda
