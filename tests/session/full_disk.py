"""A process whose disk is full: what it does with its store, told as JSON. `full_disk.c` is the disk."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.session.helpers import GREEDY, make_service, read
from tokenmill import SessionService
from tokenmill.session.store import SessionStore

SHIM = Path(__file__).with_name("full_disk.c")
ROOM = 1 << 40


class Disk:
    """The child's disk: the files of one directory may have so many bytes together."""

    def __init__(self, folder: Path) -> None:
        self.directory = folder / "store"
        self.limit = folder / "limit"
        self.library = folder / "full_disk.so"

    def has(self, num_bytes: int) -> None:
        self.limit.write_text(str(num_bytes))

    @property
    def num_bytes(self) -> int:
        """What is taken, but for the reserve."""
        files = [path for path in self.directory.iterdir() if path.is_file() and path.name != "reserve"]
        return sum(path.stat().st_size for path in files)

    def play(self, scene: str, capacity: int) -> Any:
        """Have a process do something on this disk, and kill itself; what it told before."""
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", self.library, SHIM, "-ldl"], check=True)
        self.has(capacity)
        disk = {"FULL_DISK_DIRECTORY": str(self.directory), "FULL_DISK_LIMIT": str(self.limit)}
        done = subprocess.run(
            [sys.executable, "-m", "tests.session.full_disk", scene, self.limit.parent],
            env={**os.environ, **disk, "LD_PRELOAD": str(self.library)},
            capture_output=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)


# -- in the child -----------------------------------------------------------------------------------------------------


async def add(service: SessionService) -> tuple[str, bool]:
    """A new session with one answer; is it durable?"""
    name = await service.create_session(sampling_params=GREEDY, seed=1)
    await service.append_input(name, "long " * 150)
    _, _, last = await read(await service.generate_stream(name))
    return name, bool(last.durable)


async def fill(service: SessionService) -> list[str]:
    """New sessions until one is not durable; the names of those that are."""
    names: list[str] = []
    while (added := await add(service))[1]:
        names.append(added[0])
    return names


async def delete_with_a_reserve(disk: Disk) -> None:
    """Fill the disk and delete some sessions: there is room for another one then."""
    store = SessionStore(disk.directory)
    async with make_service(store=store) as service:
        large = await service.create_session()
        await service.append_input(large, [{"role": "user", "content": "x", "more": "y" * 200_000}])
        names, before = await fill(service), disk.num_bytes
        ended = [asdict(await service.end_session(large))]
        num_free = store._post(lambda connection: connection.execute("PRAGMA freelist_count").fetchone()[0]).result()
        ended += [asdict(await service.end_session(name)) for name in names[:3]]
        sizes = {"before": before, "after": disk.num_bytes, "num_free_pages": num_free}
        name, durable = await add(service)
        tell({"kept": [*names[3:], name], "ended": ended, "durable": durable, **sizes})


async def delete_without_a_reserve(disk: Disk) -> None:
    """Deletions fail; then there is room again, and something else is written."""
    store = SessionStore(disk.directory, reserve_bytes=0)
    async with make_service(store=store) as service:
        names = await fill(service)
        disk.has(disk.num_bytes)
        ended = [asdict(await service.end_session(name)) for name in names[:2]]
        disk.has(ROOM)
        await service.append_input(names[2], "there is room again")
        tell({"kept": names[2:], "ended": ended})


async def open_on_a_full_disk(disk: Disk) -> None:
    """Nothing is free but what the reserve of the process before has."""
    async with make_service(store=disk.directory) as service:
        names = [info.session_id for info in service.list()]
        ended = [asdict(await service.end_session(name)) for name in names[:1]]
        tell({"kept": names[1:], "ended": ended})


def tell(what: Any) -> None:
    """Say it, and be gone: nothing is closed."""
    print(json.dumps(what), flush=True)
    os._exit(0)


SCENES: dict[str, Callable[[Disk], Coroutine[Any, Any, None]]] = {
    one.__name__: one for one in (delete_with_a_reserve, delete_without_a_reserve, open_on_a_full_disk)
}

if __name__ == "__main__":
    asyncio.run(SCENES[sys.argv[1]](Disk(Path(sys.argv[2]))))
