"""Untrusted text made safe to display."""

from __future__ import annotations

import re
from typing import Final

LONGEST: Final = 400
"""Maximum characters of a displayed name, unless there is room for fewer."""
LONGEST_SENTENCE: Final = 4_000
"""Maximum characters of a sentence: a finding, a note, a table cell."""
LONGEST_MESSAGE: Final = 8_000
"""Maximum characters of a line on stderr, which may hold paths of up to 4,096."""
LONGEST_NAME: Final = 1 << 14
"""Maximum characters of a name that is read; real kernels, including templates, have a few
thousand."""
LONGEST_EXPORTED: Final = 4_000
"""Maximum characters of a name in export formats that repeat it for each event."""

_HIDDEN: Final = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
"""Unicode categories that move the cursor, change the text direction, hide, or are unassigned."""
_ACTS: Final = (
    "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Characters that JSON need not escape but a terminal may interpret."""
_FORMULA: Final = tuple("=+-@\t\r\n\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}"
    "\N{FULLWIDTH HYPHEN-MINUS}\N{FULLWIDTH COMMERCIAL AT}")  # fmt: skip
"""Prefixes of cells that a spreadsheet evaluates as formulas."""


def clean(text: str, most: int = LONGEST) -> str:
    """Return the text on one line, without control characters, truncated with an ellipsis."""
    kept = text[: most + 1]
    if not (kept.isascii() and kept.isprintable()):
        kept = "".join(map(_shown, kept))
    return kept if len(kept) <= most and len(text) <= most else kept[: most - 1] + "…"


def _shown(letter: str) -> str:
    """Map white space to a space, and non-printing characters to U+FFFD."""
    if letter.isspace():
        return " "
    import unicodedata

    return "\N{REPLACEMENT CHARACTER}" if unicodedata.category(letter) in _HIDDEN else letter


def sentence(text: str) -> str:
    """Clean a text that may be as long as a sentence; see `clean`."""
    return clean(text, LONGEST_SENTENCE)


def message(text: str) -> str:
    """Clean a line for stderr, with runs of white space collapsed; see `clean`."""
    return clean(" ".join(text[: 2 * LONGEST_MESSAGE].split()), LONGEST_MESSAGE)


def cut(text: str, most: int = LONGEST_EXPORTED) -> str:
    """Truncate a text with an ellipsis; by default a name for exports, if it is absurdly long."""
    return text if len(text) <= most else text[: most - 1] + "…"


def bounded(name: str) -> str:
    """Truncate a name to `LONGEST_NAME`, since processing time grows with its length."""
    return cut(name, LONGEST_NAME)


def json_text(text: str) -> str:
    """Escape characters in JSON that a terminal may interpret; no value changes."""
    return text if text.isascii() and "\x7f" not in text else re.sub(_ACTS, _escaped, text)


def _escaped(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def cell(value: object) -> object:
    """Return a value for CSV; prefix text that a spreadsheet would evaluate with an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
