"""The HTTP server: OpenAI's API over `AsyncLLM`. Needs the extra `server`."""
