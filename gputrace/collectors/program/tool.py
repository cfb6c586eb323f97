"""Asks a tool that records for us (nsys, nvprof) what it knows, and reads what it said."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Sequence

from gputrace.errors import MissingError

Causes = Sequence[tuple[str, str]]
"""Patterns of lines, any case, each with what to tell a person; ``{said}`` stands for the line."""


def ask(words: Sequence[str]) -> tuple[int, str]:
    """The exit code of a command and all that it said; raises MissingError where it cannot run."""
    try:
        run = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except OSError as error:
        raise MissingError(f"{words[0]}: cannot be run ({error.strerror})") from None
    return run.returncode, f"{run.stdout}\n{run.stderr}"


def find_cause(causes: Causes, lines: Iterable[str]) -> str | None:
    """What to tell of the first cause that any line shows; None where no line shows one."""
    said = list(lines)
    for pattern, told in causes:
        for line in said:
            if re.search(pattern, line, re.IGNORECASE):
                return told.format(said=line)
    return None
