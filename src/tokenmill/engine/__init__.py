"""The engine: which tokens run when, and whose KV is whose. `docs/scheduling.md` explains it."""
