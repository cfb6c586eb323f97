"""`gputrace completion`: shells complete commands, options, values and paths.

Each shell runs on a terminal, where a command named gputrace says what it was called with.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.helpers import command
from tests.helpers.on_terminal import OnTerminal

USAGE: Final = 2
SHELLS: Final = {
    "bash": ('eval "$(gputrace completion bash)"', "bash --norc --noprofile -i"),
    "zsh": (
        'autoload -Uz compinit; compinit -D; eval "$(gputrace completion zsh)"',
        "zsh -f -i",
    ),
    "fish": ("gputrace completion fish | source", "fish --private --no-config -i"),
}
"""What makes each complete, as its help says, and how it starts without the person's own files."""
GPUTRACE: Final = """#!/bin/sh
if [ "$1" = completion ] || [ -n "$_GPUTRACE_COMPLETE" ]; then
    exec {python} -m gputrace "$@"
fi
echo "called: $*."
"""


@pytest.fixture(params=list(SHELLS))
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OnTerminal]:
    """A shell that completes, in a folder with a trace."""
    setup, start = SHELLS[request.param]
    if shutil.which(request.param) is None:
        pytest.skip(f"needs {request.param}")
    (tmp_path / "night.sqlite").touch()
    program = tmp_path / "bin" / "gputrace"
    program.parent.mkdir()
    program.write_text(GPUTRACE.format(python=shlex.quote(sys.executable)))
    program.chmod(0o700)
    path = f"{program.parent}:{os.environ['PATH']}"
    env = {"PATH": path, "HOME": str(tmp_path), "PS1": "> ", "HISTFILE": "", "TERM": "dumb"}
    terminal = OnTerminal(cwd=tmp_path, env=env, program=start.split())
    terminal.type(f"{setup}\n")
    terminal.type("gputrace is ready\n")
    yield terminal
    terminal.send(signal.SIGKILL)
    while terminal.process.poll() is None:
        time.sleep(0.01)


def test_a_tab_completes_commands_options_values_and_paths(shell: OnTerminal) -> None:
    shell.until("called: is ready.")
    for typed, called in (
        ("doc\t", "doctor"),
        ("analyze --keep\t", "analyze --keep-going"),
        ("report --format=x nig\t", "report --format=x night.sqlite"),
        ("analyze --format mark\t", "analyze --format markdown"),
        ("browse --de\t", "browse --demo"),
        ("record --backend host -- cat nig\t", "record --backend host -- cat night.sqlite"),
    ):
        shell.type(f"gputrace {typed}\n")
        shell.until(f"called: {called}")
    shell.type("exit\n")
    shell.end()


def test_a_shell_that_it_does_not_know_is_refused() -> None:
    ran = command.gputrace("completion", "tcsh")
    command.assert_refused(ran, USAGE, "tcsh", "'bash', 'zsh', 'fish'")


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_a_shell_that_asks_what_completes_a_word_gets_that_alone(shell: str) -> None:
    """What were said on stderr would stand in the line that the person types."""
    asks = {"_GPUTRACE_COMPLETE": f"{shell}_complete", "COMP_WORDS": "gputrace ana"}
    ran = command.gputrace(env={**asks, "COMP_CWORD": "ana" if shell == "fish" else "1"})
    assert (ran.code, ran.err) == (0, "")
    assert "analyze" in ran.out
