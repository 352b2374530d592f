"""Networks without weights, made once: to build one for each client takes longer than a small client trains."""

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import TypeVar

from torch import nn

K = TypeVar("K", bound=Hashable)


def made_once(make: Callable[[K], nn.Module]) -> Callable[[K], nn.Module]:
    """Have `make` called once for each argument; callers get modules of their own, with the same tensors as the first.

    For networks on the meta device, whose tensors are replaced, as `load_state_dict(..., assign=True)` does it.
    """
    kept = lru_cache(maxsize=8)(make)

    @wraps(make)
    def fresh(key: K) -> nn.Module:
        return _copy(kept(key))

    return fresh


def _copy(module: nn.Module) -> nn.Module:
    """Copy the tree of modules, but no tensor; `copy.deepcopy` takes as long as making it anew."""
    copy = type(module).__new__(type(module))
    for name, value in module.__dict__.items():
        copy.__dict__[name] = value.copy() if isinstance(value, dict | list | set) else value
    copy.__dict__["_modules"] = {
        name: None if child is None else _copy(child) for name, child in module._modules.items()
    }
    return copy
