"""Between users and the engine: prompts become requests, step results become deltas of text."""
