"""The HTTP API: one module for each group of endpoints, from a checked body to the answer's JSON."""
