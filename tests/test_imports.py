"""`core/` needs numpy and the standard library, nothing else: the contract must import on any machine."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tokenmill

CORE = Path(tokenmill.__file__).parent / "core"
ALLOWED = sys.stdlib_module_names | {"numpy"}


def imports_of(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.req("R20")
@pytest.mark.parametrize("file", sorted(CORE.glob("*.py")), ids=lambda file: file.name)
def test_core_imports_numpy_alone(file: Path) -> None:
    for name in imports_of(file):
        inside = name.startswith("tokenmill.core") or name == "tokenmill.errors"
        assert inside or name.split(".")[0] in ALLOWED, f"{file.name} imports {name}"


@pytest.mark.parametrize(
    "module",
    ["core", "engine.core", "engine.pool", "engine.client", "engine.llm", "engine.async_llm", "sampling.state"],
)
def test_importing_the_engine_loads_nothing_heavy(module: str) -> None:
    heavy = "torch transformers llama_cpp pydantic fastapi msgspec zmq typer hypothesis pytest"
    code = f"import sys, tokenmill.{module}; print([name for name in '{heavy}'.split() if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
