"""Models without chance: dropout off, everything else as in training, so that two runs can be compared."""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class WithoutDropout(TorchFunctionMode):
    """While it is entered, the dropout functions of torch.nn.functional let everything through."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch."""
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def still_model(model: nn.Module) -> nn.Module:
    """Copy a model, with a dropout probability of 0 in the layers of torch.nn."""
    still = copy.deepcopy(model)
    for module in still.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            module.dropout = 0.0
    return still


def still_function(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Wrap a function so that it runs without dropout."""

    def run(*flat: Tensor) -> tuple[Tensor, ...]:
        with WithoutDropout():
            return function(*flat)

    return run
