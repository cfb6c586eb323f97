"""``gputrace completion``: shell completion for ``gputrace``."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import get_completion_class

PLACES: Final = {
    "bash": "share/bash-completion/completions/gputrace",
    "zsh": "share/zsh/site-functions/_gputrace",
    "fish": "share/fish/vendor_completions.d/gputrace.fish",
}
"""Path of each shell's completion script below /usr, /usr/local or an environment's folder."""


@click.command("completion")
@click.argument("shell", metavar="SHELL", type=click.Choice(list(PLACES)))
def command(shell: str) -> None:
    """Print a script that makes SHELL complete commands, options and paths.

    \b
    bash: put  eval "$(gputrace completion bash)"  into ~/.bashrc
    zsh:  put  eval "$(gputrace completion zsh)"  into ~/.zshrc, after compinit
    fish: gputrace completion fish > ~/.config/fish/completions/gputrace.fish
    """  # noqa: D301 - what click keeps the lines by
    click.echo(script(shell), nl=False)


def script(shell: str) -> str:
    """Return the script for one of the shells of `PLACES`."""
    from gputrace.cli import cli

    completion = get_completion_class(shell)
    assert completion is not None
    # Click looks for this variable when the script calls gputrace.
    return completion(cli, {}, "gputrace", "_GPUTRACE_COMPLETE").source()
