"""A Ray cluster of two nodes on this machine, as `tokenmill cluster` starts it, and what a test may kill of it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.cluster.serving import Node
from tests.server.serving import TOKENMILL

COMMAND_S = 240.0
"""For a command of `tokenmill cluster` while others work."""
WAIT_S = 90.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Proxy(Node):
    """Ray Serve's proxies, which clients talk to as to a server."""

    def __init__(self, port: int) -> None:
        self.port, self.streams = port, []


class RayCluster:
    """Its nodes, by the directories that they were started with."""

    def __init__(self, folder: Path, store: str) -> None:
        self._folder, self._store = folder, store
        self.port = free_port()
        self.proxy = Proxy(self.port)
        self.environment = {**os.environ, "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_AUTH_MODE": "token"}
        self.directories: list[Path] = []

    # -- commands -----------------------------------------------------------------------------------------------------

    def run(self, *arguments: str, status: int = 0) -> str:
        """A command of `tokenmill cluster`; what it prints."""
        done = subprocess.run(
            [TOKENMILL, "cluster", *arguments],
            capture_output=True, text=True, timeout=COMMAND_S, env=self.environment, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout if status == 0 else done.stderr

    def up(self) -> Path:
        directory = self._folder / f"n{len(self.directories)}"
        address = [] if not self.directories else ["--join", self.address]
        port = [] if self.directories else ["--port", str(free_port())]
        self.directories.append(directory)
        self.run("up", "--dir", str(directory), "--num-cpus", "3", *address, *port)
        return directory

    @property
    def address(self) -> str:
        return str(json.loads((self.directories[0] / "node.json").read_text())["address"])

    def deploy(self, num_replicas: int, engine: dict[str, Any] | None = None, **server: Any) -> None:
        said = self.try_to_deploy(num_replicas, engine, **server)
        assert said.strip() == f"http://127.0.0.1:{self.port}/v1"

    def try_to_deploy(
        self,
        num_replicas: int,
        engine: dict[str, Any] | None = None,
        *,
        status: int = 0,
        http: dict[str, Any] | None = None,
        **server: Any,
    ) -> str:
        """What the command says that ends with this status."""
        options = {"drain_s": 3, "lease_s": 2, **server}
        file = self._folder / "cluster.json"  # which is YAML, too
        args = {"model": "fake", "store": self._store, "engine": engine or {}, "server": options}
        deployments = [{"num_replicas": num_replicas}]
        applications = [{"args": args, "deployments": deployments}]
        file.write_text(json.dumps({"http_options": {"port": self.port, **(http or {})}, "applications": applications}))
        return self.run("deploy", str(file), "--dir", str(self.directories[0]), status=status)

    def status(self) -> Any:
        return json.loads(self.run("status", "--json", "--dir", str(self.directories[0])))

    def close(self) -> None:
        """However it was left, nothing of it stays."""
        for connection in self.proxy.streams:
            connection.close()
        while left := self.processes():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    # -- processes ----------------------------------------------------------------------------------------------------

    def processes(self, title: str = "", directory: Path | None = None) -> list[int]:
        """Those of this cluster whose command line begins with `title`, all or one node's."""
        found = []
        token = f"RAY_AUTH_TOKEN={self.environment['RAY_AUTH_TOKEN']}".encode()
        for process in Path("/proc").iterdir():
            if process.name.isdecimal() and int(process.name) != os.getpid():
                with suppress(OSError):
                    command = (process / "cmdline").read_bytes()
                    if command.startswith(title.encode()) and token in (process / "environ").read_bytes():
                        found.append(int(process.name))
        return found if directory is None else [pid for pid in found if directory in self._parents(pid)]

    def _parents(self, pid: int) -> list[Path]:
        """The directory of the node that a process is of."""
        wanted = {json.loads((one / "node.json").read_text())["pid"]: one for one in self.directories}
        found = []
        while pid > 1:
            if pid in wanted:
                found.append(wanted[pid])
            with suppress(OSError):
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                continue
            break
        return found

    def replicas(self) -> dict[str, int]:
        """The pids of replicas by their names; those that are starting have none yet."""
        return {one["replica"]: one["pid"] for one in self.status()["replicas"] if one["state"] == "RUNNING"}

    def kill(self, title: str, directory: Path | None = None) -> int:
        """Kill one process of this title; its pid."""
        pid = self.processes(title, directory)[0]
        os.kill(pid, signal.SIGKILL)
        return pid


@contextmanager
def ray_cluster(store: str, num_nodes: int = 2) -> Iterator[RayCluster]:
    """In a directory with a short name: Ray's sockets are in it."""
    folder = Path(tempfile.mkdtemp(prefix="tmray-"))
    made = RayCluster(folder, store)
    try:
        for _ in range(num_nodes):
            made.up()
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


def until(is_so: Callable[[], bool], what: str, seconds: float = WAIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
