"""What a reader does where its file is broken: it stops, or goes on with what came before."""

from __future__ import annotations

from typing import Final

from gputrace.errors import InputError


class Breaks:
    """Errors in one file that a reader can stand, as far as it is asked to.

    Attributes:
        errors: those met so far.
    """

    def __init__(self, allowed: bool = False) -> None:
        self.allowed = allowed
        self.errors: list[InputError] = []

    def meet(self, error: InputError) -> None:
        """Notes an error after which there is something left to read; raises it if not allowed."""
        if not self.allowed:
            raise error
        self.errors.append(error)


STOP: Final = Breaks()
"""Allows none."""
