"""``gputrace completion``: what makes a shell complete the words of ``gputrace``."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import get_completion_class

PLACES: Final = {
    "bash": "share/bash-completion/completions/gputrace",
    "zsh": "share/zsh/site-functions/_gputrace",
    "fish": "share/fish/vendor_completions.d/gputrace.fish",
}
"""Where a shell looks for its script, below /usr, /usr/local or the folder of an environment."""


@click.command("completion")
@click.argument("shell", metavar="SHELL", type=click.Choice(list(PLACES)))
def command(shell: str) -> None:
    """Prints a script that makes SHELL complete commands, options and paths.

    \b
    bash: put  eval "$(gputrace completion bash)"  into ~/.bashrc
    zsh:  put  eval "$(gputrace completion zsh)"  into ~/.zshrc, after compinit
    fish: gputrace completion fish > ~/.config/fish/completions/gputrace.fish
    """  # noqa: D301 - what click keeps the lines by
    click.echo(script(shell), nl=False)


def script(shell: str) -> str:
    """The script for one of the shells of `PLACES`."""
    from gputrace.cli import cli

    found = get_completion_class(shell)
    assert found is not None
    # The variable is the one that click looks for when the script asks.
    return found(cli, {}, "gputrace", "_GPUTRACE_COMPLETE").source()
