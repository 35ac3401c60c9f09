"""Benchmarks: `tokenmill bench NAME`, or `python -m tokenmill.bench.NAME` where the command line is not installed."""
