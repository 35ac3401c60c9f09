"""The contract and the paged KV memory import numpy and the standard library only: they run on any machine."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tokenmill

PACKAGE = Path(tokenmill.__file__).parent
FILES = [
    *sorted((PACKAGE / "contract").glob("*.py")),
    *sorted((PACKAGE / "kv").glob("*.py")),
    PACKAGE / "backends/fake.py",
]
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
@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_the_contract_imports_numpy_alone(file: Path) -> None:
    for name in imports_of(file):
        inside = name.startswith(("tokenmill.contract", "tokenmill.kv")) or name == "tokenmill.errors"
        assert inside or name.split(".")[0] in ALLOWED, f"{file.name} imports {name}"


@pytest.mark.parametrize(
    "module",
    [
        "contract",
        "kv.paged_backend",
        "backends.fake",
        "engine.core",
        "engine.pool",
        "engine.client",
        "entrypoints.llm",
        "entrypoints.async_llm",
        "sampling.state",
    ],
)
def test_importing_the_engine_loads_nothing_heavy(module: str) -> None:
    heavy = "torch transformers llama_cpp pydantic fastapi msgspec zmq typer hypothesis pytest"
    code = f"import sys, tokenmill.{module}; print([name for name in '{heavy}'.split() if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
