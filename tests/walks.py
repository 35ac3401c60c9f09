"""`make walks`: what the property tests do, for as long as you like, with seeds that no test has seen.

Walks over KV memory against the specification, workloads against requests alone, trees of sessions against fresh
prefills, services that are killed at any moment. The first failure ends it and says how to repeat it.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.conformance.operations import RandomChooser
from tests.conformance.random_driver import drive
from tests.conformance.subjects import FAKE
from tests.conformance.torch_subject import TORCH, make_deterministic
from tests.engine.workload import play, workload
from tests.session.killing import kill_fake, kill_real_decoder
from tests.session.tree import grow, run_within

Walk = Callable[[int, int], object]
WALKS: dict[str, Walk] = {
    "KV of the fake backend": lambda seed, depth: drive(FAKE, seed, depth),
    "KV of the torch backend": lambda seed, depth: drive(TORCH, seed, depth),
    "workloads": lambda seed, depth: play(workload(RandomChooser(seed), depth)),
    "workloads on torch": lambda seed, depth: play(workload(RandomChooser(seed), depth), make_deterministic),
    "trees of sessions": lambda seed, depth: run_within(120, grow(RandomChooser(seed), depth, 60)),
    "trees of sessions with a store": lambda seed, depth: in_a_folder(
        lambda folder: run_within(120, grow(RandomChooser(seed), depth, 60, folder))
    ),
    "services that are killed": lambda seed, _: in_a_folder(lambda folder: kill_fake(folder, seed, 5)),
    "services on torch that are killed": lambda seed, _: in_a_folder(lambda folder: kill_real_decoder(folder, seed, 5)),
}  # fmt: skip


def in_a_folder(walk: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        walk(Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=None, help="begin with this one")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # engines die on purpose
    first = random.randrange(1 << 40) if options.seed is None else options.seed
    ends = time.monotonic() + 60 * options.minutes
    count = dict.fromkeys(WALKS, 0)
    for seed in itertools.count(first):
        for name, walk in WALKS.items():
            for depth in (0, 1):
                try:
                    walk(seed, depth)
                except Exception as error:
                    raise SystemExit(f"{name}: seed {seed}, depth {depth}: {error}") from error
                count[name] += 1
        if time.monotonic() > ends:
            break
    print(f"seeds {first} to {seed}: " + ", ".join(f"{number} {name}" for name, number in count.items()))


if __name__ == "__main__":
    main()
