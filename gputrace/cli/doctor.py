"""``gputrace doctor``: check what works on this machine."""

from __future__ import annotations

import click

from gputrace.cli import options
from gputrace.errors import ExitCode

_COLORS = {"ok": "green", "missing": "red", "note": "yellow"}


@click.command("doctor")
def command() -> int:
    """Check what works here for recording, and what to do about what does not.

    The exit code is 4 if GPU activity cannot be recorded.
    """
    from gputrace.collectors.doctor import examine

    checks, color = examine(), options.use_color()
    for check in checks:
        state = click.style(f"{check.state:<8}", fg=_COLORS[check.state])
        advice = f"; {check.advice}" if check.advice else ""
        click.echo(f"{state}{check.what}: {check.found}{advice}", color=color)
    missing = any(check.state == "missing" for check in checks)
    return ExitCode.MISSING_HERE if missing else ExitCode.DONE
