"""Fleets of replicas, simulated: `python -m benchmarks.fleet` (docs/fleet.md)."""
