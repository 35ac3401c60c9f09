"""Compute backends behind the contract of `tokenmill.core`."""
