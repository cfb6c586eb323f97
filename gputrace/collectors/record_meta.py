"""What a recording's folder says of how it is made: its meta.json."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path


def write_meta(folder: Path, meta: Mapping[str, str]) -> None:
    """At once: other recorders may be at it too."""
    new = folder / f"meta.{os.getpid()}"
    new.write_text(json.dumps(meta), encoding="utf-8")
    new.replace(folder / "meta.json")


def read_meta(folder: Path) -> dict[str, str]:
    """What meta.json says of a recording; nothing where it is not there yet."""
    try:
        loaded = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in loaded.items()}
