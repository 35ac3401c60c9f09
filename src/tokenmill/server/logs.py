"""Where log lines go: standard error, each with the name of the request it is about. No prompts, answers or keys."""

from __future__ import annotations

import logging
import sys

from tokenmill.errors import ConfigError
from tokenmill.server.context import REQUEST_ID

FORMAT = "%(asctime)s %(levelname)s %(request_id)s %(name)s: %(message)s"
LEVELS = ("debug", "info", "warning", "error")


def configure_logs(level: str) -> None:
    """One handler for all that tokenmill and uvicorn have to say."""
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is not known; known: {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.addFilter(_name_request)
    for name in ("tokenmill", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper() if name == "tokenmill" else logging.WARNING)


def _name_request(record: logging.LogRecord) -> bool:
    record.request_id = REQUEST_ID.get()
    return True
