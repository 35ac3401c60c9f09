"""llama.cpp's own server in a process of its own: `python llama_server.py MODEL SETTINGS`, until its input is closed.

SETTINGS are JSON: what `LlamaSettings` in servers.py has, and the port. Importing this file needs nothing but Python,
running it needs xllamacpp as well, so it may be run by the interpreter of an environment that has only that.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any


def start(model: str, settings: dict[str, int], say: Callable[[str], object] = print) -> Any:
    """A server that listens; it ends when it is forgotten."""
    llama: Any = importlib.import_module("xllamacpp")
    params = llama.CommonParams()
    params.model.path = model
    params.port = settings["port"]
    params.n_parallel, params.n_ctx = settings["slots"], settings["slots"] * settings["slot_context"]
    params.n_batch = settings["batch"]
    params.cont_batching = True
    for cpu in (params.cpuparams, params.cpuparams_batch):
        cpu.n_threads, cpu.poll = settings["threads"], settings["poll"]
    params.verbosity = 0
    server = llama.Server(params)
    say(f"xllamacpp {llama.__version__}; {llama.get_system_info()}")
    return server


def main(model: str, settings: str) -> None:
    given = json.loads(settings)
    server = start(model, given)
    print(f"llama.cpp on http://127.0.0.1:{given['port']}", flush=True)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main(*sys.argv[1:])
