"""Makes the environment that a script's header asks for, once, in the user's cache folder.

An environment does not survive being moved, so it is made where it stays, and counts only from
the moment that it holds its mark. Whoever makes one holds its lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from gputrace.bench.frameworks import Framework, Needs, read_needs

_MARK: Final = "gputrace.json"
_OLDEST, _NEWEST = 6, 30
"""Minor versions of the Pythons 3 that are looked for on the PATH."""

Tell = Callable[[str], None]


def install(framework: Framework, installer: str, tell: Tell) -> Path:
    """The Python of a framework's environment, made now if need be.

    Raises ValueError with one line where it cannot be made.
    """
    wanted = _want(framework, installer)
    folder = wanted.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock"), lambda: tell(f"{folder}: being made; waiting")):
        if not wanted.is_made:
            tell(f"{framework.name}: making an environment in {folder}")
            _Making(wanted).make(installer)
            (folder / _MARK).write_text(wanted.made_of, encoding="utf-8")
    return wanted.inside


def find_made(framework: Framework) -> Path | None:
    """The Python of an environment that was made before, by pip or by uv."""
    for installer in ("pip", "uv"):
        with suppress(ValueError):
            wanted = _want(framework, installer)
            if wanted.is_made:
                return wanted.inside
    return None


class _Wanted(NamedTuple):
    """An environment, made or not.

    Attributes:
        python: what it is made with.
        made_of: all that it depends on, as text.
    """

    folder: Path
    python: str
    needs: Needs
    requirements: list[str]
    made_of: str

    @property
    def is_made(self) -> bool:
        return (self.folder / _MARK).exists()

    @property
    def inside(self) -> Path:
        """Its Python."""
        return self.folder / "bin" / "python"


def _want(framework: Framework, installer: str) -> _Wanted:
    """What is made of is in the name: the same needs share an environment, others never do."""
    from gputrace.traces.nsys.report import cache_folder

    needs = read_needs(framework.script)
    requirements = [*needs.dependencies, *framework.requires]
    if not requirements:
        raise ValueError(f"{framework.script.name} has no header that names its dependencies")
    python = _base(needs.python, installer)
    made_of = json.dumps([requirements, *needs[1:], python, installer])
    package = re.split(r"[^\w.-]", requirements[0], maxsplit=1)[0]
    name = f"{package}-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
    return _Wanted(cache_folder() / "environments" / name, python, needs, requirements, made_of)


@contextmanager
def _locked(path: Path, waits: Callable[[], None]) -> Iterator[None]:
    with path.open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _base(wanted: str, installer: str) -> str:
    """A Python that meets ``requires-python``: this one, or the newest on the PATH.

    Of this one the program that virtual environments link to: they share what is made.
    """
    own = str(Path(sys.executable).resolve())
    try:
        fits = SpecifierSet(wanted)
    except InvalidSpecifier:
        raise ValueError(f"requires-python {wanted!r} is no version specifier") from None
    if installer == "uv":
        return wanted or own  # uv looks for itself, and may fetch one
    if fits.contains(".".join(map(str, sys.version_info[:3])), prereleases=True):
        return own
    for minor in range(_NEWEST, _OLDEST - 1, -1):
        program = shutil.which(f"python3.{minor}")
        if program and fits.contains(_version(program), prereleases=True):
            return program
    raise ValueError(f"needs Python {wanted}, and there is none on the PATH")


def _version(program: str) -> str:
    """As 3.8.18; one that no specifier admits for a program that does not run."""
    code = "import sys, venv; print('.'.join(map(str, sys.version_info[:3])))"
    ran = subprocess.run(
        [program, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    return ran.stdout.strip() or "0"


class _Making:
    """One environment being made; what is said goes to a log beside it."""

    def __init__(self, wanted: _Wanted) -> None:
        needs, self._folder, self._python = wanted.needs, wanted.folder, wanted.python
        self._requirements = [*wanted.requirements, *(f"--only-binary={n}" for n in needs.unbuilt)]
        self._inside = str(wanted.inside)
        self._log = self._folder.with_suffix(".log")
        self._constraints = self._folder.with_suffix(".constraints") if needs.constraints else None
        if self._constraints:
            self._constraints.write_text("\n".join(needs.constraints) + "\n", encoding="utf-8")

    def make(self, installer: str) -> None:
        """Raises ValueError with one line where a step fails."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._log.write_bytes(b"")
        if installer == "uv":
            self._with_uv()
        else:
            self._with_pip()

    def _with_pip(self) -> None:
        self._run([self._python, "-m", "venv", str(self._folder)])
        pip = [self._inside, "-m", "pip", "--disable-pip-version-check", "install"]
        # That of an old Python may not know the wheels of today; it has to where none is newer.
        with suppress(ValueError):
            self._run([*pip, "--upgrade", "pip"])
        # What is imported is compiled then; all of it would be half of the time and a third more.
        self._run([*pip, "--no-compile", *self._requirements], self._pip_variables())

    def _pip_variables(self) -> Mapping[str, str]:
        """pip before 25.3 builds under the first, later ones under the second."""
        if self._constraints is None:
            return {}
        names = ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")
        return {name: f"{os.environ.get(name, '')} {self._constraints}".strip() for name in names}

    def _with_uv(self) -> None:
        uv = _find_uv()
        self._run([*uv, "venv", "--python", self._python, str(self._folder)])
        install = [*uv, "pip", "install", "--python", self._inside]
        if self._constraints:
            install += ["--build-constraints", str(self._constraints)]
        self._run([*install, *self._requirements])

    def _run(self, command: list[str], variables: Mapping[str, str] | None = None) -> None:
        with self._log.open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            code = subprocess.call(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(variables or {})},
            )
        if code:
            raise ValueError(f"{_problem(self._log)} (see {self._log})")


def _find_uv() -> list[str]:
    program = shutil.which("uv")
    if program:
        return [program]
    if find_spec("uv") is not None:
        return [sys.executable, "-m", "uv"]
    raise ValueError("uv is neither on the PATH nor in this Python; `pip install uv`")


def _problem(log: Path) -> str:
    """The line of a log that says most."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if line.lower().startswith(("error:", "× "))]
    return (told or lines)[-1]
