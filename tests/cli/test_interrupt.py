"""Ctrl-C ends the command at once, with the exit code that shells expect."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.helpers import command

SLEEPS = """#!{python}
import pathlib, sys, time
pathlib.Path({started!r}).touch()
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_bytes(b"half of it")
time.sleep(300)
"""


def test_ctrl_c_ends_the_command(tmp_path: Path) -> None:
    report, nsys, started = tmp_path / "run.nsys-rep", tmp_path / "nsys", tmp_path / "started"
    report.write_bytes(b"NSYSREP")
    nsys.write_text(SLEEPS.format(python=sys.executable, started=str(started)), encoding="utf-8")
    nsys.chmod(0o755)
    cache = tmp_path / "cache"
    with subprocess.Popen(
        [sys.executable, "-m", "gputrace", "analyze", str(report)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=command.environment({"GPUTRACE_NSYS": str(nsys), "XDG_CACHE_HOME": str(cache)}),
    ) as running:
        while not started.exists():
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (130, b"")
    assert err.strip() == b"gputrace: interrupted"
    assert [path for path in cache.rglob("*") if path.is_file()] == []
