"""The contract and the paged KV memory import numpy and the standard library only: they run on any machine."""

import ast
import os
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
        "sampling.sampler",
    ],
)
def test_importing_the_engine_loads_nothing_heavy(module: str) -> None:
    heavy = "torch transformers llama_cpp pydantic fastapi msgspec zmq typer hypothesis pytest"
    code = f"import sys, tokenmill.{module}; print([name for name in '{heavy}'.split() if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


WINDOWS = """
import importlib, os, pkgutil, signal, sys, types
# What is not ours is imported first, as it is on this system.
import asyncio, multiprocessing.connection, subprocess, tempfile, socket, zipfile, uuid
import fastapi, gguf, httptools, huggingface_hub, jinja2, numpy, prometheus_client, pydantic
import safetensors, tokenizers, typer, uvicorn, zmq
import contextlib
with contextlib.suppress(ImportError):
    import llama_cpp, torch.nn.functional
import huggingface_hub.file_download, uvicorn.protocols.http.httptools_impl, uvicorn.lifespan.on
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in UNIX_ONLY:
            raise ModuleNotFoundError(name)
UNIX_ONLY = {"fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty", "uvloop", "triton"}
for name in UNIX_ONLY & sys.modules.keys():
    del sys.modules[name]
sys.meta_path.insert(0, Missing())
sys.modules["msvcrt"] = types.SimpleNamespace(LK_LOCK=1, LK_NBLCK=2, locking=lambda *_: None)
for name in ("O_CLOEXEC", "posix_fallocate", "pwrite", "sched_getaffinity"):
    delattr(os, name)
for name in ("SIGHUP", "SIGSTOP", "SIGCONT", "SIGKILL"):
    delattr(signal, name)
sys.platform = "win32"
import tokenmill
for one in pkgutil.walk_packages(tokenmill.__path__, "tokenmill."):
    if not one.name.startswith(NOT_THERE):
        importlib.import_module(one.name)
        print(one.name)
"""


def test_what_windows_needs_imports_nothing_of_unix() -> None:
    """The C library, CUDA, Ray and the commands that stop and wake processes are not for it."""
    torch_parts = [f"tokenmill.backends.torch.{name}" for name in ("kernels", "cuda", "transformers_adapter")]
    ray_parts = [f"tokenmill.cluster.{name}" for name in ("control", "hooks", "replica")]
    not_there = ("tokenmill.__main__", "tokenmill.backends.cpu.libtokenmill", *torch_parts, *ray_parts)
    code = f"NOT_THERE = {not_there!r}\n{WINDOWS}"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"tokenmill.cli.serve", "tokenmill.session.store", "tokenmill.server.app"} <= set(done.stdout.split())


def test_a_quantized_model_is_run_without_torch() -> None:
    """On the CPU, drawn with a seed: neither torch nor the gguf package, whose import takes a second, is loaded."""
    code = """
import sys
from tokenmill import LLM, SamplingParams
with LLM("smollm2-135m", device="cpu", kv_cache_tokens=256) as llm:
    (output,) = llm.generate(["Once"], SamplingParams(max_tokens=3, seed=1, temperature=0.7, top_p=0.9))
print(len(output.outputs[0].token_ids), [name for name in ("torch", "transformers", "gguf") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "3 []"


SAMPLES = """
import sys
from tokenmill import LLM, SamplingParams
params = SamplingParams(
    max_tokens=4, seed=1, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, typical_p=0.9, xtc_probability=0.5,
    repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, dry_multiplier=0.8, min_tokens=2,
    logit_bias={3: 1.0}, banned_token_ids=(5,), logprobs=2,
)
with LLM("fake", kv_cache_tokens=4096) as llm:
    assert len(llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids) == 4
print([name for name in ("torch", "llama_cpp", "transformers") if name in sys.modules])
"""


@pytest.mark.parametrize("kernels", ["1", "0"], ids=["in C", "in numpy"])
def test_a_sampled_step_loads_nothing_heavy(kernels: str) -> None:
    """The first one must not wait for an import of seconds; an install without torch samples all the same."""
    environment = {**os.environ, "TOKENMILL_KERNELS": kernels}
    done = subprocess.run([sys.executable, "-c", SAMPLES], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "[]", done.stderr


COMMAND = """
import sys
from tokenmill.cli.main import main
sys.argv = ["tokenmill", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
heavy = "numpy tokenizers jinja2 fastapi uvicorn huggingface_hub llguidance zmq torch transformers gguf rich".split()
print([name for name in heavy if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("arguments", "imported"),
    [
        (["--help"], []),
        (["serve", "--help"], []),
        (["generate", "Hi", "--max-tokens", "2", "--model", "smollm2-135m"], ["numpy", "tokenizers", "jinja2"]),
    ],
    ids=["help", "help of serve", "generate"],
)
def test_a_command_imports_what_it_needs(arguments: list[str], imported: list[str]) -> None:
    """Help is there in a fifth of a second; `generate` needs neither the server's packages nor those of structured
    outputs."""
    done = subprocess.run([sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == str(imported)
