"""Compute backends behind the contract of `tokenmill.contract`."""
