"""Finds a Python that can run a framework's script, or makes one in the user's cache folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gputrace.bench.frameworks import Framework
from gputrace.bench.installing import find_made, install

_ASK: Final = """
import sys
sys.path[0] = sys.argv[1]
from importlib.util import find_spec
for name in sys.argv[2:]:
    try:
        spec = find_spec(name)
    except Exception:
        spec = None
    if spec is None or spec.origin in (None, "namespace"):
        print(name)
"""
"""Names the modules that are not there, without importing any; a mere folder is no module."""

_LOAD: Final = """
import ctypes, sys
for name in sys.argv[1:]:
    try:
        ctypes.CDLL(name)
    except OSError:
        print(name)
"""
"""Names the libraries that cannot be loaded."""

_ASK_S: Final = 60


class Unavailable(Exception):
    """No Python can run the framework; the text is one line that says why."""


@dataclass(slots=True)
class Environments:
    """Where each framework's Python is.

    Attributes:
        named: what the user gave for frameworks, by their names.
        installer: ``pip`` or ``uv``; None where nothing is to be installed, but what was before
            is taken.
        tell: gets a line before something takes long.
    """

    named: Mapping[str, Path]
    installer: str | None
    tell: Callable[[str], None]
    _found: dict[str, Path | str] = field(default_factory=dict)

    def find(self, framework: Framework) -> Path:
        """The Python of a framework; raises Unavailable, each time for the same reason."""
        if framework.name not in self._found:
            try:
                self._found[framework.name] = self._find(framework)
            except Unavailable as error:
                self._found[framework.name] = str(error)
        found = self._found[framework.name]
        if isinstance(found, str):
            raise Unavailable(found)
        return found

    def _find(self, framework: Framework) -> Path:
        _check_libraries(framework)
        if framework.name in self.named:
            return _given(framework, self.named[framework.name])
        missing = _missing(Path(sys.executable), framework)
        if not missing:
            return Path(sys.executable)
        made = self._install(framework) if self.installer else find_made(framework)
        if made is None:
            raise Unavailable(
                f"this Python lacks {', '.join(missing)}; --install makes an environment, "
                f"--python {framework.name}=PATH names one"
            )
        if missing := _missing(made, framework):
            told = f"the environment that {framework.script.name} asks for"
            raise Unavailable(f"{told} lacks {', '.join(missing)}")
        return made

    def _install(self, framework: Framework) -> Path:
        try:
            return install(framework, self.installer or "pip", self.tell)
        except (OSError, ValueError) as error:
            raise Unavailable(f"cannot be installed: {error}") from None


def _given(framework: Framework, path: Path) -> Path:
    """A Python that the user named: the program, or the folder of an environment."""
    program = path / "bin" / "python" if path.is_dir() else path
    found = shutil.which(program)
    if found is None:
        raise Unavailable(f"--python {framework.name}={path}: no such program")
    missing = _missing(Path(found), framework)
    if missing:
        raise Unavailable(f"--python {framework.name}={path}: lacks {', '.join(missing)}")
    return Path(found).absolute()


def _check_libraries(framework: Framework) -> None:
    """Raises Unavailable where the machine has not what no environment brings."""
    if not framework.libraries:
        return
    asked = [sys.executable, "-c", _LOAD, *framework.libraries]
    ran = subprocess.run(asked, capture_output=True, text=True, check=False)
    if missing := ran.stdout.split():
        told = f"{framework.script.name} says in its head how to have them"
        raise Unavailable(f"this machine lacks {', '.join(missing)}; {told}")


def _missing(python: Path, framework: Framework) -> list[str]:
    """The modules that a framework needs and a Python has not; raises Unavailable for no Python."""
    asked = [str(python), "-c", _ASK, str(framework.script.parent), *framework.modules]
    try:
        ran = subprocess.run(
            asked,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        raise Unavailable(f"{python}: is no Python 3 that runs") from None
    return ran.stdout.split()
