"""Inputs guided by what of gputrace they reach, where atheris is installed.

atheris adds counters to the readers as they are imported, and keeps inputs that reach
something new; the mutators are those of the random engine.
"""

from __future__ import annotations

import sys
from hashlib import sha256
from random import Random
from typing import TYPE_CHECKING, Any

import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore]

if TYPE_CHECKING:
    from tests.fuzz.session import Session

READERS = [
    "gputrace.readers",
    "gputrace.store",
    "gputrace.collectors.spool",
    "gputrace.studies",
]
"""What has counters: to give them to all of gputrace takes 20 s, and slows what is no reader."""
_LONGEST = 1 << 18
"""Bytes of an input."""


def instrumented() -> Any:
    """A context in which gputrace's modules get their counters."""
    return atheris.instrument_imports(include=READERS, enable_loader_override=False)


def mutate_guided(session: Session, seed: int, inputs: int, seconds: float) -> None:
    """Never comes back: libFuzzer ends the process once there were so many inputs, or so long."""
    corpus = session.folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for data in [*session.seeds, *session.pools["read"]]:
        (corpus / sha256(data).hexdigest()[:16]).write_bytes(data)

    def mutate(data: bytes, most: int, number: int) -> bytes:
        changed: bytes = session.target.mutate(Random(number), data)[:most]
        return changed

    def give(data: bytes) -> None:
        session.give(data)

    options = {
        "runs": inputs, "max_total_time": int(seconds), "seed": seed % (1 << 31) or 1,
        "max_len": _LONGEST, "rss_limit_mb": 0, "timeout": 3600, "print_final_stats": 0,
        "detect_leaks": 0, "artifact_prefix": f"{session.folder}/",
    }  # fmt: skip
    words = [f"-{name}={value}" for name, value in options.items()]
    atheris.Setup([sys.argv[0], *words, str(corpus)], give, custom_mutator=mutate)
    atheris.Fuzz()
