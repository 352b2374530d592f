"""The layers of the architecture: who may import whom, and what an import really loads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("fedcomp", "fedcomp_clients", "fedcomp_strategies", "fedcomp_simulations")
FOLDERS = {
    "fedcomp": ROOT / "fedcomp",
    "fedcomp_clients": ROOT / "clients" / "fedcomp_clients",
    "fedcomp_strategies": ROOT / "strategies" / "fedcomp_strategies",
    "fedcomp_simulations": ROOT / "simulations" / "fedcomp_simulations",
}
ALLOWED = {
    "fedcomp": {"numpy"},
    "fedcomp_clients": {"fedcomp", "flwr", "numpy", "onnxruntime"},
    "fedcomp_strategies": {"fedcomp", "flwr", "numpy", "torch"},
}
TORCH_MAY = ("fedcomp/device/", "clients/fedcomp_clients/torch/", "clients/fedcomp_clients/export/")
ONNX_MAY = ("clients/fedcomp_clients/export/", "clients/fedcomp_clients/deploy/")  # for workstations and servers
LOADED = {  # importing the first must not load any of the others
    "fedcomp": [
        "flwr",
        "torch",
        "onnxruntime",
        "scipy",
        "fedcomp_clients",
        "fedcomp_strategies",
        "fedcomp_simulations",
    ],
    "fedcomp_clients": ["flwr", "onnxruntime", "torch", "onnx", "onnx_ir"],
    "fedcomp_clients.mod": ["onnxruntime", "torch", "ray", "scipy", "fedcomp_strategies", "fedcomp_simulations"],
    "fedcomp_clients.app": ["torch", "onnx", "onnx_ir", "ray", "scipy", "fedcomp_strategies", "fedcomp_simulations"],
    "fedcomp_clients.onnx_trainer": ["flwr", "torch", "onnx", "onnx_ir", "scipy"],
    "fedcomp_clients.bundle": ["flwr", "onnxruntime", "torch", "onnx", "onnx_ir"],
    "fedcomp_clients.deploy": ["torch", "onnx", "onnxruntime", "fedcomp_strategies", "fedcomp_simulations"],
    "fedcomp_strategies": ["ray", "fedcomp_clients", "fedcomp_simulations"],
    "fedcomp_simulations.cli": ["torch", "flwr", "matplotlib", "ray"],
}


def imports(path: Path) -> set[str]:
    """Top-level packages that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_their_layer_may(package: str) -> None:
    for path in FOLDERS[package].rglob("*.py"):
        foreign = imports(path) - set(sys.stdlib_module_names) - ALLOWED[package] - {package}
        if path.relative_to(ROOT).as_posix().startswith(TORCH_MAY):
            foreign -= {"torch"}
        if path.relative_to(ROOT).as_posix().startswith(ONNX_MAY):
            foreign -= {"onnx", "onnx_ir", "onnxscript"}
        assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


@pytest.mark.parametrize("module", LOADED)
def test_an_import_loads_only_what_it_needs(module: str) -> None:
    code = f"import sys, {module}; print(' '.join(sys.modules))"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    )
    assert not loaded & set(LOADED[module])


def test_no_code_runs_while_reading() -> None:
    """c36: the tree has no pickle, eval or exec."""
    for folder in FOLDERS.values():
        for path in folder.rglob("*.py"):
            tree = ast.parse(path.read_text())
            names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | imports(path)
            assert not names & {"eval", "exec", "pickle", "marshal", "shelve"}, path
            for node in ast.walk(tree):
                if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                    assert isinstance(node.value, ast.Constant)
                    assert node.value.value is False


@pytest.mark.parametrize("package", OURS)
def test_packages_are_typed(package: str) -> None:
    assert (FOLDERS[package] / "py.typed").exists()


@pytest.mark.parametrize("folder", ["clients", "strategies", "simulations"])
def test_no_package_has_a_generic_name(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()
