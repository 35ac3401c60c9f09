"""`make mutants`: how many small faults in the code the tests notice.

Draws single-point mutants from a seed, runs each against the tests that cover its line, and lists the survivors. Those
known to be equivalent to the original are in equivalent.toml with the reason; they are neither run nor counted. Results
go to .mutants/, as JSON and as a section for docs/testing.md.
"""

from __future__ import annotations

import argparse
import json
import queue
import resource
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.mutants.covering import CACHE, PARTS, ROOT, CoverageMap, measured
from tests.mutants.running import Result, Workshop, plan_for
from tests.mutants.sites import Mutant, mutants_of, sample

EQUIVALENT = Path(__file__).with_name("equivalent.toml")


def main() -> int:
    options = parsed()
    paths = [path for given in options.paths for path in modules(ROOT / given)]
    drawn = sample(ROOT, paths, options.count, options.seed)
    entries = tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])
    run = Run(measured(), {entry["key"]: entry["reason"] for entry in entries}, 60 * options.minutes)
    report = Report(options.seed, len(drawn))
    for outcome in run.outcomes(drawn, options.jobs, frozenset(options.keys)):
        report.outcomes.append(outcome)
        report.write(CACHE.parent / f"seed-{options.seed}")
        print(f"[{len(report.outcomes)}/{len(drawn)}] {outcome.line()}", flush=True)
    print(report.markdown())
    for entry in stale(entries):
        print(f"stale in {EQUIVALENT.name}, judge it anew: {entry['key']} ({entry['path']}, {entry['function']})")
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="which mutants are drawn (default: 0)")
    parser.add_argument("--count", type=int, default=100, help="number of mutants (default: 100)")
    parser.add_argument("--minutes", type=float, default=90.0, help="start no mutant after so many (default: 90)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("--keys", nargs="*", default=[], help="of those drawn, run only these")
    parser.add_argument(
        "--paths",
        nargs="*",
        default=[f"src/tokenmill/{part}" for part in PARTS],
        help="modules or folders to mutate (default: %(default)s)",
    )
    return parser.parse_args()


def modules(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def stale(entries: list[dict[str, str]]) -> list[dict[str, str]]:
    """Those of the known equivalents whose function has changed since: they have to be judged anew."""
    return [
        entry
        for entry in entries
        if not (ROOT / entry["path"]).exists()
        or entry["key"] not in keys_of(entry["path"], entry["function"], (ROOT / entry["path"]).read_bytes())
    ]


def keys_of(path: str, function: str, source: bytes) -> set[str]:
    return {mutant.key(source) for mutant in mutants_of(path, source) if mutant.function == function}


# -- running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    key: str
    diff: str
    result: Result

    @property
    def where(self) -> str:
        return f"{self.mutant.path}:{self.mutant.line}"

    def line(self) -> str:
        result = self.result
        return f"{result.status:10} {self.where} {self.mutant.kind} ({result.seconds:.0f} s, {result.by or 'no test'})"


class Run:
    """Mutants against the tests that cover them, several at a time."""

    def __init__(self, covered: CoverageMap, equivalent: dict[str, str], most_s: float) -> None:
        self._covered = covered
        self._equivalent = equivalent
        self._ends = time.monotonic() + most_s
        self._free: queue.SimpleQueue[Workshop] = queue.SimpleQueue()

    def outcomes(self, drawn: list[Mutant], num_jobs: int, keys: frozenset[str]) -> Iterator[Outcome]:
        """As they come; those that there is no time for are left out, and with `keys` all others."""
        with ExitStack() as stack:
            for _ in range(num_jobs):
                self._free.put(Workshop(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="m-")))))
            self._check_baseline(drawn)
            pool = stack.enter_context(ThreadPoolExecutor(num_jobs))
            stack.callback(pool.shutdown, cancel_futures=True)
            for done in as_completed([pool.submit(self._outcome, mutant, keys) for mutant in drawn]):
                if (outcome := done.result()) is not None:
                    yield outcome

    def _check_baseline(self, drawn: list[Mutant]) -> None:
        """The tests of some mutant pass on the copy as it is: else everything would seem to be caught."""
        plans = [plan for mutant in drawn if (plan := plan_for(mutant, self._covered)).limits]
        workshop = self._free.get()
        result = workshop.run(None, plans[0]) if plans else Result("survived")
        self._free.put(workshop)
        if result.status != "survived":
            sys.exit(f"{result.by} fails without a mutant ({result.status})")

    def _outcome(self, mutant: Mutant, keys: frozenset[str]) -> Outcome | None:
        source = (ROOT / mutant.path).read_bytes()
        key = mutant.key(source)
        if keys and key not in keys:
            return None
        if key in self._equivalent:
            result = Result("equivalent", self._equivalent[key])
        elif time.monotonic() > self._ends:
            return None
        else:
            workshop = self._free.get()
            try:
                result = workshop.run(mutant, plan_for(mutant, self._covered))
            finally:
                self._free.put(workshop)
        return Outcome(mutant, key, mutant.diff(source), result)


# -- reporting --------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    seed: int
    num_drawn: int
    outcomes: list[Outcome] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def of(self, *statuses: str) -> list[Outcome]:
        found = [outcome for outcome in self.outcomes if outcome.result.status in statuses]
        return sorted(found, key=lambda outcome: (outcome.mutant.path, outcome.mutant.line))

    def summary(self) -> dict[str, Any]:
        num_caught, num_alive = len(self.of("caught", "timeout")), len(self.of("survived", "uncovered"))
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            "seed": self.seed,
            "drawn": self.num_drawn,
            "run": len(self.outcomes),
            "caught": num_caught,
            "of them by a timeout": len(self.of("timeout")),
            "survived": len(self.of("survived")),
            "not covered": len(self.of("uncovered")),
            "equivalent": len(self.of("equivalent")),
            "score": f"{100 * num_caught / max(1, num_caught + num_alive):.1f} %",
            "minutes": round((time.monotonic() - self.began) / 60, 1),
            "CPU minutes": round((children.ru_utime + children.ru_stime) / 60, 1),
        }

    def markdown(self) -> str:
        summary = self.summary()
        lines = [
            f"### Mutants of seed {self.seed}",
            "",
            "| " + " | ".join(summary) + " |",
            "| --- " * len(summary) + "|",
        ]
        lines += ["| " + " | ".join(map(str, summary.values())) + " |", ""]
        for outcome in self.of("survived", "uncovered", "equivalent"):
            mutant, result = outcome.mutant, outcome.result
            told = {
                "survived": f"survived {result.num_started} of {result.num_covering} tests",
                "uncovered": "not covered",
            }
            why = told.get(result.status, f"equivalent: {result.by}")
            lines += [f"`{outcome.where}` `{mutant.function}` {mutant.kind}, {why} (`{outcome.key}`)", ""]
            lines += ["```diff", outcome.diff, "```", ""]
        return "\n".join(lines)

    def write(self, stem: Path) -> None:
        """JSON with everything, Markdown for people, and entries for equivalent.toml that want a reason."""
        outcomes = [{**asdict(outcome), "where": outcome.where} for outcome in self.outcomes]
        stem.with_suffix(".json").write_text(json.dumps({**self.summary(), "outcomes": outcomes}, indent=1))
        stem.with_suffix(".md").write_text(self.markdown())
        stem.with_suffix(".toml").write_text("\n".join(map(entry_for, self.of("survived", "uncovered"))))


def entry_for(outcome: Outcome) -> str:
    mutant = outcome.mutant
    return (
        f'[[mutant]]\nkey = "{outcome.key}"\npath = "{mutant.path}"\nfunction = "{mutant.function}"\n'
        f"change = '''\n{outcome.diff}\n'''\nreason = \"\"\n"
    )


if __name__ == "__main__":
    sys.exit(main())
