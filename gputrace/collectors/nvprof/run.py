"""Runs a program under nvprof as if nvprof were not there.

nvprof gives the program its own streams and process group, so the terminal reaches it. But it dies
of signals that it does not know without a word to the program, ends with a code of its own, and
makes the program ignore SIGPIPE: what stands between them mends that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from gputrace.collectors.backend import Launch
from gputrace.collectors.nvprof.log import why_not_started
from gputrace.collectors.program.supervised import Supervision, Tool

TOOL: Final = Tool("nvprof", apart=False, why_not_started=why_not_started)


def run_under_nvprof(
    launch: Launch, folder: Path, _tell: Callable[[str], object], meanwhile: Callable[[], None]
) -> int:
    """Runs the program to its end and nvprof to its own; the program's exit code.

    Raises CannotRun where the program cannot be run, MissingError where nvprof does not start it.
    """
    return Supervision(TOOL, launch, folder).run(meanwhile)
