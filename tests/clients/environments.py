"""The clients and their versions, and how each gets an environment of its own under `.clients`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".clients"


@dataclass(frozen=True)
class Client:
    """A script and what it needs; the first requirement is the client itself."""

    script: str
    requirements: tuple[str, ...]
    checkpoint: bool = False
    """It talks to a server of a small random checkpoint, not of the usual model."""

    @property
    def is_javascript(self) -> bool:
        return self.script.endswith(".mjs")

    @property
    def version(self) -> str:
        return self.requirements[0].rpartition("@" if self.is_javascript else "==")[2]


CLIENTS = {
    "openai": Client("check_openai", ("openai==3.49.0",)),
    "openai-2": Client("check_openai", ("openai==2.20.0",)),
    "anthropic": Client("check_anthropic", ("anthropic==2.8.0",)),
    "ollama": Client("check_ollama", ("ollama==0.6.3",)),
    "javascript": Client(
        "check_js.mjs",
        ("openai@6.49.0", "@anthropic-ai/sdk@1.8.0", "ollama@0.6.4", "ai@7.0.169", "@ai-sdk/openai-compatible@3.0.90"),
    ),
    "litellm": Client("check_litellm", ("litellm==1.104.5",)),
    "litellm-proxy": Client("check_litellm_proxy", ("litellm[proxy]==1.104.5", "anthropic==2.8.0")),
    "langchain": Client("check_langchain", ("langchain-openai==1.7.3", "langchain==1.4.7")),
    "llama-index": Client(
        "check_llama_index",
        ("llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0"),
    ),
    "aider": Client("check_aider", ("aider-chat==0.86.2",)),
    "pydantic-ai": Client("check_pydantic_ai", ("pydantic-ai-slim[openai]==2.66.0",)),
    "openai-agents": Client("check_openai_agents", ("openai-agents==0.24.0",)),
    "llm": Client("check_llm", ("llm==0.36",)),
    "guidellm": Client("check_guidellm", ("guidellm==0.8.1", "torch==2.13.0", "transformers==5.22.2"), checkpoint=True),
    "lm-eval": Client("check_lm_eval", ("lm-eval[api]==0.4.13", "transformers==5.22.2"), checkpoint=True),
}


def python_with(name: str, requirements: tuple[str, ...]) -> Path:
    """The interpreter of an environment with these packages."""
    return _python_environment(name, Client("", requirements))


class InstallFailed(Exception):
    """pip could not make an environment; the message is what it said."""


def environment(name: str) -> Path:
    """The interpreter of a client's environment. Made if it is not there, or was made for other versions."""
    if CLIENTS[name].is_javascript:
        return _node_environment(FOLDER / name, CLIENTS[name])
    return _python_environment(name, CLIENTS[name])


def _python_environment(name: str, client: Client) -> Path:
    folder = FOLDER / name
    python, stamp = folder / "bin" / "python", folder / ".stamp"
    wanted = _fingerprint(client)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"setting up .clients/{name}: {' '.join(client.requirements)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=False)
    if any(one.startswith("torch==") for one in client.requirements):  # the CPU build is all that a client needs
        _run([sys.executable, str(ROOT / "tools" / "install_torch.py"), "cpu", "--python", str(python)])
    _install(python, client.requirements)
    stamp.write_text(wanted)
    return python


def _node_environment(folder: Path, client: Client) -> Path:
    """The script, beside the packages that npm has installed for it."""
    stamp, script = folder / ".stamp", folder / client.script
    wanted = _fingerprint(client)
    if not stamp.exists() or stamp.read_text() != wanted:
        npm = shutil.which("npm")
        if npm is None:
            raise InstallFailed("npm is not installed")
        print(f"setting up .clients/{folder.name}: {' '.join(client.requirements)}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _run([npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *client.requirements])
        stamp.write_text(wanted)
    shutil.copy(ROOT / "tests" / "clients" / client.script, script)
    return script


def launch(name: str, found: Path) -> list[str]:
    """The command that runs a client's script in its environment."""
    client = CLIENTS[name]
    return ["node", str(found)] if client.is_javascript else [str(found), "-m", f"tests.clients.{client.script}"]


def _fingerprint(client: Client) -> str:
    parts = (sys.version, *client.requirements)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _install(python: Path, requirements: tuple[str, ...]) -> None:
    """With the pip of this interpreter; what is never imported is never compiled."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--disable-pip-version-check"]
    _run([*pip, "-qq", "--no-compile", *requirements])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise InstallFailed(done.stderr.strip()[-600:])
