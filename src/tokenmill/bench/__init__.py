"""Benchmarks for users: `tokenmill bench NAME`.

    serve.py       load on an OpenAI-compatible server, and its figures
    workloads.py   its conversations, their arrival times, and the driver that sends them
    load_clients.py  timed requests to a server process
    throughput.py  tokens a second by batch size, offline
    sessions.py    what a session saves
    report.py      everything on one machine: JSON and a page
    compare.py     this engine next to others (contenders.py), and servers next to each other (servers.py)
    shapes.py      random checkpoints of typical sizes to compare on, quantized by llama.cpp

The project's own benchmarks are in `benchmarks/` of the repository.
"""

from __future__ import annotations

import argparse


def bench_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows every default."""
    return argparse.ArgumentParser(prog=prog, description=description, formatter_class=_DefaultsFormatter)


class _DefaultsFormatter(argparse.HelpFormatter):
    """argparse's own writes `None`, the value of an environment variable, and `False` for each flag."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        is_shown = action.required or action.nargs == 0 or "(default: " in text
        default = " ".join(map(str, action.default)) or "none" if isinstance(action.default, list) else "%(default)s"
        return text if is_shown else f"{text} (default: {default})"
