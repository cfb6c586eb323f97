"""Waiting for what goes on beside a test."""

from __future__ import annotations

import threading


def wait_until_kept() -> None:
    """Until the cache has what this process found out."""
    for thread in threading.enumerate():
        if thread.name == "cache":
            thread.join()
