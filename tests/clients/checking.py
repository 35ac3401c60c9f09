"""What the scripts share: where the server is, and a loop that runs checks and says how they went.

Imported by the interpreters of all clients, so it needs the standard library alone.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

PROMPT = "Write one short sentence about the sea."
TOO_LONG = "hello " * 20_000
"""More tokens than any model here takes."""


@dataclass(frozen=True)
class Target:
    """A running server, as a client is told about it."""

    base_url: str
    api_key: str
    model: str


def run_checks(names: Mapping[str, Any]) -> NoReturn:
    """Run each function `check_...` of a module against the server that the command line names.

    One line a check, `ok WHAT` or `FAILED WHAT: WHY`; one that fails does not keep the others from running. The exit
    code is 1 if any failed.
    """
    if len(sys.argv) != 4:
        sys.exit("usage: python -m tests.clients.check_... BASE_URL API_KEY MODEL")
    target = Target(*sys.argv[1:])
    checks = [thing for name, thing in names.items() if name.startswith("check_")]
    passed = [_run(check, target) for check in checks]
    sys.exit(0 if all(passed) else 1)


def _run(check: Callable[[Target], Any], target: Target) -> bool:
    what = check.__name__.removeprefix("check_").replace("_", " ")
    try:
        waiting = check(target)
        if inspect.isawaitable(waiting):
            asyncio.run(_finish(waiting))
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        place = traceback.extract_tb(error.__traceback__)
        line = next((frame.lineno for frame in reversed(place) if frame.filename == inspect.getfile(check)), 0)
        print(f"FAILED {what}: {reason[:600]} (line {line})", flush=True)
        return False
    print(f"ok {what}", flush=True)
    return True


async def _finish(waiting: Any) -> None:
    await waiting


def raises(kind: type[Exception], call: Callable[[], object]) -> Any:
    """The error that `call` must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")
