"""Writes the folder of a Flower app whose code is in an importable module, so that `flwr run` can bundle it."""

from collections.abc import Mapping
from pathlib import Path

from fedcomp.errors import ConfigError
from fedcomp_simulations.deployment.environment import UserValue, as_toml

_PROJECT = """\
[project]
name = "{name}"
version = "1.0.0"
license = {{ file = "LICENSE" }}
dependencies = ["flwr>=1.42"]

[tool.flwr.app]
publisher = "fedcomp"
fab-format-version = 1
flwr-version-target = "1.42.0"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

[tool.flwr.app.config]
"""


def write_app(folder: Path, name: str, server: str, client: str, config: Mapping[str, UserValue]) -> Path:
    """Write an app that imports its two halves. Returns its folder.

    Args:
        folder: where the app's own folder comes.
        name: of the app: small letters and hyphens.
        server, client: "module:attribute" of the ServerApp and the ClientApp; all processes must be able to import it.
        config: of the run: only what is given here can be changed when it is started.

    Raises ConfigError if `server` or `client` is not "module:attribute", or if Flower cannot hold a value.
    """
    package = name.replace("-", "_")
    (folder / name / package).mkdir(parents=True)
    lines = [f"{key} = {text}\n" for key, text in as_toml(config).items()]
    (folder / name / "pyproject.toml").write_text(_PROJECT.format(name=name, package=package) + "".join(lines), "utf-8")
    (folder / name / "LICENSE").write_text("Apache-2.0\n")
    (folder / name / package / "__init__.py").touch()
    for file, target in (("server_app.py", server), ("client_app.py", client)):
        module, colon, attribute = target.partition(":")
        if not (colon and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise ConfigError(f'app {name!r}: expected "module:attribute", got {target!r}')
        (folder / name / package / file).write_text(f"from {module} import {attribute} as app\n\n__all__ = ['app']\n")
    return folder / name
