"""The Python API: `LLM`, `AsyncLLM`, the options they take and the memory a model needs."""
