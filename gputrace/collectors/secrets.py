"""The command line as a trace may show it: what looks secret is replaced.

To replace too much costs a reader little; what is missed is in a file that people hand around.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

HIDDEN: Final = "***"

_NAME: Final = (
    r"(?:(?:pass(?:word|wd|phrase)?|passcode|pwd|secret|token|api.?key|auth(?:orization)?"
    r"|credentials?|bearer|cookie|webhook|signature)(?![a-z])[\w-]{0,40}"
    r"|(?<![a-z])(?:key(?:[-_]?id)?|pat|sig|sas)(?![\w-]))"
)
"""Bounds keep the time linear in the length of a word."""
_ENDS_SECRET: Final = re.compile(rf"(?i){_NAME}$")
_SPACE: Final = re.compile(r"\s")
_VALUE: Final = r"""(?:"[^"]*"|'[^']*'|\\.|[^\s"'\\;&|])+"""
_WITHIN: Final = (
    # of a shell's line or JSON: NAME=VALUE, "name": "value", --name value, Authorization: Bearer
    re.compile(
        rf"""(?i)(?P<shown>{_NAME}\\?["']?\s*[=:]\s*(?:(?:bearer|basic|token)\s+)?){_VALUE}"""
    ),
    re.compile(rf"(?i)(?P<shown>(?<!\S)-[\w.-]{{0,40}}?{_NAME}\s+){_VALUE}"),
    re.compile(rf"(?i)(?P<shown>\bbearer\s+){_VALUE}"),
    # of an address: scheme://user:password@host
    re.compile(r"(?P<shown>[A-Za-z][\w+.-]{0,20}://)[^/\s?#]+(?=@)"),
    # what says itself what it is: of Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS; a JWT
    re.compile(
        r"(?P<shown>\b)(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|eyJ)"
        r"[\w.-]{12,}"
    ),
)


def masked(command: Sequence[str]) -> list[str]:
    """The words of a command line with the values of what looks secret replaced."""
    shown: list[str] = []
    is_value = False
    for word in command:
        shown.append(HIDDEN if is_value else _masked_word(word))
        is_value = word.startswith("-") and _ENDS_SECRET.search(word) is not None
    return shown


def _masked_word(word: str) -> str:
    name, equals, _ = word.partition("=")
    if equals and not _SPACE.search(name) and _ENDS_SECRET.search(name):
        return f"{name}={HIDDEN}"
    for pattern in _WITHIN:
        word = pattern.sub(rf"\g<shown>{HIDDEN}", word)
    return word
