"""What was found in the same files before: asked again, they need no reading."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from gputrace.analyzers.kept import freeze, thaw
from gputrace.analyzers.options import Options
from gputrace.plugins import plugins
from gputrace.traces.cache import is_known, keep_beside, key_of, load

_Answer = TypeVar("_Answer")


class Earlier:
    """What the cache has of files and folders, as they are when this is made.

    Where readers or analyzers of plugins are installed, nothing: their code may change unseen.
    """

    def __init__(self, paths: Sequence[Path | str], windows: bool = False) -> None:
        self._paths = [Path(path) for path in paths]
        # Names are shown as they were given, and windows alone may be read in another way.
        self._given = f"{[str(path) for path in paths]} {windows}"
        plugged = plugins("readers") or plugins("analyzers")
        self._files = None if plugged else key_of(self._paths, "")

    @property
    def any(self) -> bool:
        """Whether anything is kept of these files, so that they could be opened."""
        return is_known(self._files)

    def find(self, kind: type[_Answer], options: Options) -> _Answer | None:
        """An analysis, or a scene, that was made with the same options; None where none was."""
        if not self.any:
            return None
        entry = load(self._key(kind, options))
        return entry and thaw(entry, kind)

    def keep(self, answer: object, options: Options) -> None:
        """Keeps one for the next time, unless its files changed since."""
        if self._files is not None and key_of(self._paths, "") == self._files:
            keep_beside(self._key(type(answer), options), lambda: freeze(answer))

    def _key(self, kind: type, options: Options) -> str | None:
        return key_of(self._paths, f"{kind.__name__} {options} {self._given}")
