"""Words of strangers made fit for whoever shows them: one place for all that we write.

Names of kernels, ranges, hosts and files may hold anything: escape sequences, markup, formulas,
text that runs the other way, far too many letters. A terminal, a page or a spreadsheet would obey
some of it.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

LONGEST: Final = 400
"""Letters of a name that a terminal or a page shows, unless there is room for fewer."""
LONGEST_SENTENCE: Final = 4_000
"""Letters of a sentence: a finding, a note, a cell of a table."""
LONGEST_MESSAGE: Final = 8_000
"""Letters of a line on stderr, which may name files: a path has at most 4,096."""
LONGEST_EXPORTED: Final = 4_000
"""Letters of a name in files for other programs that say it once for each event."""

_HIDDEN: Final = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
"""What moves the cursor, turns the writing, hides, or is no character."""
_ACTS: Final = re.compile(
    "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
"""What JSON need not escape, and a terminal that shows the JSON may obey."""
_FORMULA: Final = tuple("=+-@\t\r\n\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}"
    "\N{FULLWIDTH HYPHEN-MINUS}\N{FULLWIDTH COMMERCIAL AT}")  # fmt: skip
"""What a cell begins with that a spreadsheet computes."""


def clean(text: str, most: int = LONGEST) -> str:
    """The text on one line, without control characters, cut with an ellipsis."""
    kept = text[: most + 1]
    if not (kept.isascii() and kept.isprintable()):
        kept = "".join(map(_shown, kept))
    return kept if len(kept) <= most and len(text) <= most else kept[: most - 1] + "…"


def _shown(letter: str) -> str:
    """Spaces for white space; a mark for what is not to be seen."""
    if letter.isspace():
        return " "
    return "\N{REPLACEMENT CHARACTER}" if unicodedata.category(letter) in _HIDDEN else letter


def sentence(text: str) -> str:
    """As `clean`, of a text that may be long."""
    return clean(text, LONGEST_SENTENCE)


def message(text: str) -> str:
    """As `clean`, of a line for stderr: white space is one space."""
    return clean(" ".join(text[: 2 * LONGEST_MESSAGE].split()), LONGEST_MESSAGE)


def exported(name: str) -> str:
    """A name as exports say it with each event: whole, if it is not absurdly long."""
    return name if len(name) <= LONGEST_EXPORTED else name[: LONGEST_EXPORTED - 1] + "…"


def json_text(text: str) -> str:
    """The same JSON with escapes for what a terminal may obey; no value changes."""
    return text if text.isascii() and "\x7f" not in text else _ACTS.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def cell(value: object) -> object:
    """A value of a CSV file; a text that a spreadsheet would compute begins with an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
