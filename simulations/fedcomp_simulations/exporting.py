"""The command `fedcomp export`: a model that a module names becomes a training bundle."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedcomp.errors import ConfigError
from fedcomp_clients.export import LOSSES, SGD, Exported, export_training_bundle

SAMPLES = 8
_SIDES = 32


def export(
    model: str, out: Path, *, loss: str, example: str | None, x_shape: str | None, tokens: int | None, optimizer: SGD,
    check: bool,
) -> Exported:  # fmt: skip
    """Export what `module:name` stands for, a model or a function that makes one.

    Args:
        loss: one of LOSSES, or `module:name` of a function.
        example: `module:name` of x and y, or of a function that makes them.
        x_shape: instead: the shape of one sample, as in "1x28x28", for random values...
        tokens: ...or for whole numbers below this.

    Raises ConfigError or ExportError for what the user can mend.
    """
    torch.manual_seed(0)
    network = _made(_named("MODEL", model), nn.Module)
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{model}: expected a torch module or a function that makes one, got {_kind(network)}")
    criterion = loss if loss in LOSSES else _named("--loss", loss)
    if not (isinstance(criterion, str) or callable(criterion)):
        raise ConfigError(f"--loss: expected a function of output and y, got {_kind(criterion)}")
    if (example is None) == (x_shape is None):
        raise ConfigError("expected either --example or --x-shape, to know the shapes of x and y")
    if example is not None:
        pair = _made(_named("--example", example), tuple)
    else:
        pair = _random(network, loss, _shape(x_shape or ""), tokens)
    return export_training_bundle(network, criterion, pair, out, optimizer=optimizer, check=check)


def _named(option: str, text: str) -> Any:
    """What `module:name` stands for; modules of the working directory count."""
    module, _, name = text.partition(":")
    if not (module and name):
        wanted = f"{', '.join(LOSSES)} or module:name" if option == "--loss" else "module:name"
        raise ConfigError(f"{option}: expected {wanted}, got {text!r}")
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{option}: {text}: there is no module {error.name!r} in {here} or installed") from error
    except AttributeError as error:
        raise ConfigError(f"{option}: {text}: {error}") from error
    except Exception as error:  # whatever happens in the user's module
        raise ConfigError(f"{option}: {module} cannot be imported: {_kind(error)}: {error}") from error
    return found


def _made(found: Any, kind: type) -> Any:
    """The thing itself, or what a function or class makes."""
    if isinstance(found, kind) or not callable(found):
        return found
    maker: Callable[[], Any] = found
    try:
        return maker()
    except Exception as error:
        name = getattr(found, "__name__", "it")
        raise ConfigError(f"{name}() fails: {_kind(error)}: {error}; name something that needs no arguments") from error


def _kind(value: object) -> str:
    return type(value).__name__


def _shape(text: str) -> tuple[int, ...]:
    sides = text.split("x")
    if not all(side.isdecimal() and int(side) > 0 for side in sides) or len(sides) > _SIDES:
        raise ConfigError(f'--x-shape: expected sides such as "1x28x28", got {text!r}')
    return tuple(map(int, sides))


def _random(model: nn.Module, loss: str, shape: tuple[int, ...], tokens: int | None) -> tuple[Tensor, Tensor]:
    """Random samples, and targets of the shape that the model's output asks for."""
    if loss not in LOSSES:
        raise ConfigError("--x-shape does not say which y a loss of your own takes; pass --example")
    if tokens is not None and tokens < 1:
        raise ConfigError(f"--tokens: expected at least 1, got {tokens}")
    x = torch.randn(SAMPLES, *shape) if tokens is None else torch.randint(tokens, (SAMPLES, *shape))
    was = model.training
    try:
        with torch.no_grad():
            output = model.eval()(x)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ConfigError(f"--x-shape: the model fails on x of shape {tuple(x.shape)}: {error}") from error
    finally:
        model.train(was)
    if not isinstance(output, Tensor) or output.dim() < 2:
        raise ConfigError("--x-shape: expected the model to return a tensor (samples, ..., outputs); pass --example")
    if loss == "cross_entropy":
        return x, torch.randint(output.shape[-1], output.shape[:-1])
    return x, torch.randn(output.shape)
