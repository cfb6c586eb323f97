"""NVML sampling beside a recording, in a separate process.

The driver's library may crash the process that it is loaded into, which must not cost the
recording: glibc has been seen to abort a recorder for a corrupted heap.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from gputrace.collectors.backend import NONE, Limits
from gputrace.collectors.launch.group_witness import RECORDED_BY


class Sampler:
    """Sampler of every GPU of this machine, in a process that ends with this one.

    ``notice`` is a line for the user if something is missing, else empty; known at the end.
    """

    def __init__(self, share: float = 0.005) -> None:
        """``share`` is the maximum part of a core for the rings and counters of all cards."""
        self.notice = ""
        self._share = share
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, folder: Path, hz: float = 4.0, limits: Limits = NONE) -> None:
        """Start with ``hz`` ticks a second (0.1 to 1000) and one at the end."""
        # In a session of its own: what is typed at the terminal is for the program.
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "gputrace.collectors.nvml.sampling"),
                    *(str(folder.absolute()), str(hz), str(self._share)),
                    *(str(limits.segment_ns), str(limits.keep), str(limits.max_bytes)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=own_environment(),
                start_new_session=True,
            )
        except OSError as error:
            self.notice = f"no GPU sampling: {error.strerror}"

    def stop(self, timeout: float = 5.0) -> None:
        """Take a last sample; abandon a hanging driver after ``timeout`` seconds."""
        process = self._process
        if process is None:
            return
        try:
            said, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.notice = "GPU sampling did not end: the driver does not answer"
            process.kill()
            return
        self.notice, code = said.decode(errors="replace"), process.returncode
        if code and not self.notice:
            how = f"exit code {code}"
            with suppress(ValueError):
                how = signal.Signals(-code).name if code < 0 else how
            self.notice = f"GPU sampling ended early: its process ended by {how}"


def own_environment() -> dict[str, str]:
    """Return this process's environment and module path, without what records."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(RECORDED_BY)}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
