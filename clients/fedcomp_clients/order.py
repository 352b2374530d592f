"""The order of mods: what has to happen before compression, and cannot be done to a frame.

Flower calls ``mods[0]`` first, so the mods before `compress_mod` get its frame instead of a model.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp import ConfigError
from fedcomp._callers import callers

CLIPPING_NORM = "clipping_norm"
"""Key by which Flower's wrappers for client-side clipping tell clients how long an update may be."""

_BEFORE = ("centraldp_mods", "localdp_mod")  # files of Flower that hold mods which work on models


def check_outer() -> None:
    """Raise ConfigError if a mod that works on models is waiting for what the caller returns.

    Mods do not know each other, but one that stands before ours has called it, so it is on the stack.
    """
    for module, function in callers():
        place = module.rpartition(".")[2] if module.startswith("flwr.") else ""
        if place in _BEFORE:
            name = "LocalDpMod" if place == "localdp_mod" else function
            raise ConfigError(
                f"{name} stands before compress_mod and would be given a frame instead of a model; "
                f"put it after: mods=[compress_mod, {name}]"
            )


def unclipped(before: Mapping[str, NDArray[Any]], after: Mapping[str, NDArray[Any]], norm: object) -> str:
    """What to say if the server counts on an update clipped to `norm` and gets a longer one; "": it does not.

    Looks at floating-point tensors of one or more dimensions: Flower's mods leave the others unclipped.
    """
    if isinstance(norm, bool) or not isinstance(norm, int | float):
        return ""
    moved = [
        float(np.linalg.norm(after[name].astype(np.float64) - start))
        for name, start in before.items()
        if start.dtype.kind == "f" and start.ndim and name in after and after[name].shape == start.shape
    ]
    length = math.hypot(*moved)
    if length <= norm * 1.001:  # float32 models round
        return ""
    return (
        f"the server counts on updates no longer than {norm:.4g}, this one has length {length:.4g}: is "
        "fixedclipping_mod or adaptiveclipping_mod missing after compress_mod?"
    )
