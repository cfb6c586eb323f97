"""What commands say beside their results: a line on stderr, whatever the names in it hold."""

from __future__ import annotations

import click

from gputrace.cleaning import message


def tell(text: str) -> None:
    """Writes ``gputrace: `` and the text, as one line without control characters."""
    click.echo(f"gputrace: {message(text)}", err=True)
