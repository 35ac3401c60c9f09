"""`python -m benchmarks.fleet`."""

import sys

from benchmarks.fleet.scenarios import main

sys.exit(main())
