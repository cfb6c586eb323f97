"""Files that an installation has beside the package: manual pages, and scripts of shells.

They are made when gputrace is built: setup.py asks for them.
"""

from __future__ import annotations

import os
import time

from gputrace.cli.completion import PLACES, script
from gputrace.cli.manual import pages


def shared_files() -> dict[str, str]:
    """The text of each by its path, as share/man/man1/gputrace.1."""
    # The variable is that of reproducible-builds.org, in seconds since 1970.
    built_s = float(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
    day = time.strftime("%Y-%m-%d", time.gmtime(built_s))
    manual = {f"share/man/man1/{name}": text for name, text in pages(day).items()}
    return manual | {place: script(shell) for shell, place in PLACES.items()}
