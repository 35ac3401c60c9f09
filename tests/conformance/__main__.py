"""The conformance suite without pytest or hypothesis: `python -m tests.conformance [--seeds N] [SUBJECT ...]`."""

from __future__ import annotations

import argparse
import sys
import traceback
from functools import partial

from tests.conformance.all_subjects import SUBJECTS
from tests.conformance.checks import CHECKS
from tests.conformance.random_driver import drive
from tests.conformance.subjects import Subject


def run(subject: Subject, num_seeds: int) -> int:
    """The number of failures, each printed as it happens."""
    failures = 0
    checks = [
        check
        for check in CHECKS
        if (subject.can_fail or not check.needs_faults) and (subject.can_shift or not check.needs_shift)
    ]
    stories = {check.name: partial(check.run, subject) for check in checks}
    walks = {
        f"random operations, seed {seed}, depth {depth}": partial(drive, subject, seed, depth)
        for seed in range(num_seeds)
        for depth in subject.depths
    }
    for name, story in {**stories, **walks}.items():
        try:
            story()
        except Exception:
            failures += 1
            print(f"FAILED {subject.name}: {name}\n{traceback.format_exc()}")
    print(f"{subject.name}: {len(stories) + len(walks) - failures} passed, {failures} failed")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("subjects", nargs="*", help="names of subjects (all)")
    parser.add_argument("--seeds", type=int, default=100, help="random runs at each depth (100)")
    options = parser.parse_args()
    chosen = [subject for subject in SUBJECTS if not options.subjects or subject.name in options.subjects]
    return 1 if sum(run(subject, options.seeds) for subject in chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
