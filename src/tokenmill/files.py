"""Reading the small files of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenmill.errors import ModelLoadError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is no JSON: {error}") from None
    return content if isinstance(content, dict) else {}
