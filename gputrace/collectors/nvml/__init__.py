"""NVML sampling beside a recording, in a process of its own.

What the driver's library does to the process that it is loaded into, a crash at worst, must not
cost the recording: glibc has been seen to abort a recorder for a heap that was broken meanwhile.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from gputrace.collectors.limits import NONE, Limits

_OURS: Final = ("GPUTRACE_", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")
"""Variables by which a program is recorded; the sampling process is none."""


class Sampler:
    """Samples every GPU of this machine, in a process that ends with this one.

    ``notice`` is a line for the user where something is missing, else empty; known at the end.
    """

    def __init__(self, share: float = 0.005) -> None:
        """`share` of a core is what the rings and counters of all cards may take at most."""
        self.notice = ""
        self._share = share
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, folder: Path, hz: float = 4.0, limits: Limits = NONE) -> None:
        """Begins, with `hz` ticks a second (0.1 to 1000) and one at the end."""
        # Out of the terminal's reach: what is typed there is for the program.
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
        """Has a last sample taken; a driver that hangs is left alone after `timeout` s."""
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
    """Ours, with the modules that we have and nothing that records."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
