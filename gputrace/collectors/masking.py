"""Masking of secrets on command lines: passwords, keys and tokens, by the words around them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

HIDDEN: Final = "***"

_NO_TOKENS: Final = "".join(
    rf"(?<!{word}[-_])"
    for word in ("pad", "bos", "eos", "unk", "cls", "sep", "mask", "image", "video", "audio")
)
_OF_MODELS: Final = (
    r"[-_](?:ids?|types?|dim|len|length|size|index|idx|count|limit|drop\w{0,9}|per|weights?)\b"
)
"""Language models have tokens that are no secrets: ``--pad-token``, ``--token-type``."""
_NO_KEYS: Final = r"(?<!sort[-_])(?<!by[-_])(?<!group[-_])(?<!partition[-_])"
_NAME: Final = (
    r"(?:(?:pass(?:words?|wd|phrase|code)|(?<!by)(?<!com)pass|pwd|secrets?(?:[-_]?key)?"
    rf"|(?:{_NO_TOKENS}token|signature)(?!{_OF_MODELS})|(?:api|access|account|private|shared).?keys?"
    r"|auth(?:orization)?|credentials?|bearer|cookie|webhook)(?![a-z])"
    r"(?![-_](?:file|path|dir)\b)[\w-]{0,40}"
    r"|(?<=--)tokens(?![\w-])"
    rf"|(?<![a-z]){_NO_KEYS}(?:key(?:[-_]?id)?|pat|pw|sig|sas|jwt|otp)(?![\w-]))"
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
    # of curl: -u user:password, but not docker's -u 1000:1000
    re.compile(
        rf"(?P<shown>(?<!\S)(?:-u\s*|--(?:proxy-)?user[\s=]+)(?!\d+:\d+(?!\S))[^\s:/]{{1,80}}:)"
        rf"{_VALUE}"
    ),
    # of an address: scheme://user:password@host
    re.compile(r"(?P<shown>[A-Za-z][\w+.-]{0,20}://)[^/\s?#]+(?=@)"),
    re.compile(r"(?P<shown>\bhooks\.slack\.com/(?:services|workflows)/)[\w/-]+"),
    # what says itself what it is: of Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS, NVIDIA,
    # Google, Stripe, npm, PyPI, Docker, SendGrid, Square; a JWT
    re.compile(
        r"(?P<shown>\b)(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|eyJ|nvapi-|AIza"
        r"|ya29\.|[rs]k_(?:live|test)_|npm_|pypi-|dckr_pat_|SG\.|sq0[a-z]{3}-)[\w.-]{12,}"
    ),
)


def masked(command: Sequence[str]) -> list[str]:
    """Return the words of a command line with secret-looking values replaced."""
    return [
        HIDDEN
        if before.startswith("-") and _ENDS_SECRET.search(before)
        else _masked_word(f"{before} {word}").partition(" ")[2]
        if before in ("-u", "--user", "--proxy-user")
        else _masked_word(word)
        for before, word in zip(["", *command], command, strict=False)
    ]


def _masked_word(word: str) -> str:
    name, equals, _ = word.partition("=")
    if equals and not _SPACE.search(name) and _ENDS_SECRET.search(name):
        return f"{name}={HIDDEN}"
    for pattern in _WITHIN:
        word = pattern.sub(rf"\g<shown>{HIDDEN}", word)
    return word
