"""Where log lines go: standard error, each with the name of the request it is about. No prompts, answers or keys."""

from __future__ import annotations

import json
import logging
import sys
import time

from tokenmill.errors import ConfigError
from tokenmill.server.context import REQUEST_ID

FORMAT = "%(asctime)s %(levelname)s %(request_id)s %(name)s: %(message)s"
LEVELS = ("debug", "info", "warning", "error")
STYLES = ("text", "json")


def configure_logs(level: str, style: str = "text") -> None:
    """One handler for all that tokenmill and uvicorn have to say, as text or as an object of JSON a line."""
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is not known; known: {', '.join(LEVELS)}")
    if style not in STYLES:
        raise ConfigError(f"log format {style!r} is not known; known: {', '.join(STYLES)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if style == "json" else logging.Formatter(FORMAT))
    handler.addFilter(_name_request)
    for name in ("tokenmill", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper() if name == "tokenmill" else logging.WARNING)


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger; then the fields of a request that has ended, or a message."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{at}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "logger": record.name}
        request = getattr(record, "request", None)
        if request is not None:
            line |= request
        else:
            line |= {"id": getattr(record, "request_id", "-"), "message": record.getMessage()}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, separators=(",", ":"))


def _name_request(record: logging.LogRecord) -> bool:
    record.request_id = REQUEST_ID.get()
    return True
