"""The screen as a picture that is whole in itself."""

from __future__ import annotations

import re
from typing import Any, Final

from textual.app import App

_REMOTE_FONT: Final = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_FONT: Final = "font-family: Fira Code, monospace;"
_COMMENT: Final = re.compile(r"<!--.*?-->\s*")


def picture(app: App[Any]) -> str:
    """An SVG of what is on the screen; fetches nothing, whatever opens it."""
    drawn = app.export_screenshot(title="gputrace browse", simplify=True)
    drawn = _COMMENT.sub("", _REMOTE_FONT.sub("", drawn), 1)
    return drawn.replace(_FONT, "font-family: DejaVu Sans Mono, Menlo, Consolas, monospace;")
