"""Frameworks of a study, and Python environments for their scripts: existing ones, or made in the
cache.
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
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from gputrace.errors import InputError, UsageError

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
"""Program that prints the missing modules without importing any; a plain folder is no module."""

_LOAD: Final = """
import ctypes, sys
for name in sys.argv[1:]:
    try:
        ctypes.CDLL(name)
    except OSError:
        print(name)
"""
"""Program that prints the shared libraries that cannot be loaded."""

_ASK_S: Final = 60


class Unavailable(Exception):
    """Error for a framework that no Python can run; the message is one line."""


@dataclass(slots=True)
class Environments:
    """Lookup of each framework's Python.

    Attributes:
        named: Pythons that the user named, by framework.
        installer: ``pip`` or ``uv``; None to install nothing, and use only what exists.
        tell: called with a line before something takes long.
    """

    named: Mapping[str, Path]
    installer: str | None
    tell: Callable[[str], None]
    _found: dict[str, Path | str] = field(default_factory=dict)

    def find(self, framework: Framework) -> Path:
        """Return the Python of a framework; raises Unavailable, each time for the same reason."""
        if framework.name not in self._found:
            try:
                self._found[framework.name] = self._find(framework)
            except Unavailable as error:
                self._found[framework.name] = str(error)
        python = self._found[framework.name]
        if isinstance(python, str):
            raise Unavailable(python)
        return python

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
            which = f"the environment that {framework.script.name} asks for"
            raise Unavailable(f"{which} lacks {', '.join(missing)}")
        return made

    def _install(self, framework: Framework) -> Path:
        try:
            return install(framework, self.installer or "pip", self.tell)
        except (OSError, ValueError) as error:
            raise Unavailable(f"cannot be installed: {error}") from None


def _given(framework: Framework, path: Path) -> Path:
    """Check a Python that the user named: a program, or the folder of an environment."""
    program = path / "bin" / "python" if path.is_dir() else path
    python = shutil.which(program)
    if python is None:
        raise Unavailable(f"--python {framework.name}={path}: no such program")
    missing = _missing(Path(python), framework)
    if missing:
        raise Unavailable(f"--python {framework.name}={path}: lacks {', '.join(missing)}")
    return Path(python).absolute()


def _check_libraries(framework: Framework) -> None:
    """Raise Unavailable if shared libraries are missing that no environment can provide."""
    if not framework.libraries:
        return
    asked = [sys.executable, "-c", _LOAD, *framework.libraries]
    ran = subprocess.run(asked, capture_output=True, text=True, check=False)
    if missing := ran.stdout.split():
        advice = f"{framework.script.name} says in its head how to have them"
        raise Unavailable(f"this machine lacks {', '.join(missing)}; {advice}")


def _missing(python: Path, framework: Framework) -> list[str]:
    """Return the modules that a Python lacks; raises Unavailable if it does not run."""
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


_MARK: Final = "gputrace.json"
_OLDEST, _NEWEST = 6, 30
"""Minor versions of Python 3 that are looked for on the PATH."""

Tell = Callable[[str], None]


def install(framework: Framework, installer: str, tell: Tell) -> Path:
    """Return the Python of a framework's environment, which is made if need be.

    Raises ValueError with one line if it cannot be made.
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
    """Return the Python of an environment that was made before, by pip or uv."""
    for installer in ("pip", "uv"):
        with suppress(ValueError):
            wanted = _want(framework, installer)
            if wanted.is_made:
                return wanted.inside
    return None


class _Wanted(NamedTuple):
    """Environment that may not exist yet.

    Attributes:
        python: the base Python.
        made_of: all inputs of the environment, as text.
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
        """Return the environment's Python."""
        return self.folder / "bin" / "python"


def _want(framework: Framework, installer: str) -> _Wanted:
    """Describe a framework's environment; its name is a hash of all inputs."""
    from gputrace.store import cache_folder

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
    """Return a Python that meets ``requires-python``: this one, or the newest on the PATH.

    Links are resolved, so that virtual environments of one base Python share environments.
    """
    current = str(Path(sys.executable).resolve())
    try:
        fits = SpecifierSet(wanted)
    except InvalidSpecifier:
        raise ValueError(f"requires-python {wanted!r} is no version specifier") from None
    if installer == "uv":
        return wanted or current  # uv searches by itself, and may download one.
    if fits.contains(".".join(map(str, sys.version_info[:3])), prereleases=True):
        return current
    for minor in range(_NEWEST, _OLDEST - 1, -1):
        program = shutil.which(f"python3.{minor}")
        if program and fits.contains(_version(program), prereleases=True):
            return program
    raise ValueError(f"needs Python {wanted}, and there is none on the PATH")


def _version(program: str) -> str:
    """Return the version, as 3.8.18; ``0``, which meets no specifier, if it does not run."""
    code = "import sys, venv; print('.'.join(map(str, sys.version_info[:3])))"
    ran = subprocess.run(
        [program, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    return ran.stdout.strip() or "0"


class _Making:
    """Construction of an environment, with its output in a log beside it."""

    def __init__(self, wanted: _Wanted) -> None:
        needs, self._folder, self._python = wanted.needs, wanted.folder, wanted.python
        self._requirements = [*wanted.requirements, *(f"--only-binary={n}" for n in needs.unbuilt)]
        self._inside = str(wanted.inside)
        self._log = self._folder.with_suffix(".log")
        self._constraints = self._folder.with_suffix(".constraints") if needs.constraints else None
        if self._constraints:
            self._constraints.write_text("\n".join(needs.constraints) + "\n", encoding="utf-8")

    def make(self, installer: str) -> None:
        """Make the environment; raises ValueError with one line if a step fails."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._log.write_bytes(b"")
        if installer == "uv":
            self._with_uv()
        else:
            self._with_pip()

    def _with_pip(self) -> None:
        self._run([self._python, "-m", "venv", str(self._folder)])
        pip = [self._inside, "-m", "pip", "--disable-pip-version-check", "install"]
        # The pip of an old Python may not know current wheels; keep it if there is no newer one.
        with suppress(ValueError):
            self._run([*pip, "--upgrade", "pip"])
        # Modules are compiled on import; all would double the time and take a third more space.
        self._run([*pip, "--no-compile", *self._requirements], self._pip_variables())

    def _pip_variables(self) -> Mapping[str, str]:
        """Return pip's variables for build constraints: the first one before pip 25.3."""
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
    """Return the most informative line of a log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error:", "× "))]
    return (errors or lines)[-1]


FILE: Final = "frameworks.toml"


class _Entry(msgspec.Struct):
    """Table of frameworks.toml."""

    title: str
    script: str
    arguments: list[str] = []
    modules: list[str] = []
    libraries: list[str] = []
    requires: list[str] = []
    updates: list[str] = []


@dataclass(frozen=True, slots=True)
class Framework:
    """Entry of frameworks.toml.

    Attributes:
        arguments: arguments of the script, before those of a study.
        modules: modules that its Python must have.
        libraries: shared libraries of the machine that it loads.
        requires: requirements beyond those of the script's header.
        updates: supported placements; empty if not declared.
    """

    name: str
    title: str
    script: Path
    arguments: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()


class Needs(NamedTuple):
    """Requirements in a script's header (PEP 723).

    Attributes:
        python: version specifier, as ``>=3.8,<3.12``; empty for any.
        constraints: build constraints.
        unbuilt: packages that are installed only from wheels.
    """

    dependencies: tuple[str, ...] = ()
    python: str = ""
    constraints: tuple[str, ...] = ()
    unbuilt: tuple[str, ...] = ()


def find_workloads(study: Path, named: Path | None) -> Path:
    """Return the frameworks.toml of the named folder, else of the study's parent or own folder.

    The parent comes first: a folder of studies may contain a study of that name.
    """
    folders = [named] if named is not None else [study.absolute().parent.parent, study.parent]
    for folder in folders:
        if (folder / FILE).is_file():
            return folder / FILE
    raise InputError(
        folders[-1], f"holds no {FILE}; name the folder of the scripts with --workloads"
    )


def read_frameworks(path: Path) -> dict[str, Framework]:
    """Read a frameworks.toml; its scripts lie beside it."""
    frameworks = {}
    for name, table in read_toml(path).items():
        if isinstance(table, dict):
            check_keys(path, f"[{name}]", table, _Entry.__struct_fields__)
        entry: _Entry = convert(path, f"[{name}]", table, _Entry)
        frameworks[name] = Framework(
            name,
            entry.title,
            path.parent / entry.script,
            *map(tuple, (entry.arguments, entry.modules, entry.libraries)),
            *map(tuple, (entry.requires, entry.updates)),
        )
    return frameworks


def check_names(study: Path, names: Iterable[str], known: Mapping[str, Framework]) -> None:
    """Raise UsageError for a framework without an entry, InputError for a missing script."""
    for name in names:
        if name not in known:
            raise UsageError(f"{study}: no framework {name!r}; {nearest(name, known)}")
        if not known[name].script.is_file():
            raise InputError(known[name].script, f"is not there, and [{name}] names it")


def read_needs(script: Path) -> Needs:
    """Read the header of a script; raises InputError for an invalid one."""
    try:
        text = _header(script.read_text(encoding="utf-8"))
        table: dict[str, Any] = tomllib.loads(text)
    except OSError as error:
        raise InputError(script, f"cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(script, f"its header is not TOML: {error}") from None
    uv = table.get("tool", {}).get("uv", {})
    return Needs(
        tuple(table.get("dependencies", ())),
        table.get("requires-python", ""),
        tuple(uv.get("build-constraint-dependencies", ())),
        tuple(uv.get("no-build-package", ())),
    )


def _header(text: str) -> str:
    """Return the lines between ``# /// script`` and ``# ///``, uncommented."""
    lines = text.splitlines()
    if "# /// script" not in lines:
        return ""
    after = lines[lines.index("# /// script") + 1 :]
    header = takewhile(lambda line: line.startswith("#") and line != "# ///", after)
    return "\n".join(line[2:] for line in header)


_LARGEST: Final = (1 << 63) - 1
Count = Annotated[int, msgspec.Meta(ge=1, le=_LARGEST)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
_Rate = Annotated[float, msgspec.Meta(gt=0)]
_Share = Annotated[float, msgspec.Meta(gt=0, lt=1)]
OnOff = bool | Literal["on", "off"]
_Models = Literal[
    "resnet20", "resnet44", "resnet110", "resnet50", "inception3", "densenet121", "alexnet"
]

MADE: Final = ("png", "jpeg")
"""Values of ``data`` for images that are generated for the study."""

CORES: Final = "cores"
"""Value of ``workers`` for the number of cores of the machine that runs it."""


LAUNCHERS: Final = {"ddp": "torchrun", "horovod": "mpi", "chainermn": "mpi"}
"""Placements with a process per GPU, and the launcher for several machines."""


class Setting(NamedTuple):
    """Option of the workload scripts, by its name in a study."""

    name: str
    kind: Any


OPTIONS: Final = (
    Setting("model", _Models),
    Setting("batch", Count),
    Setting("steps", Count),
    Setting("warmup", Natural),
    Setting("data", str),
    Setting("device", Literal["auto", "cuda", "cpu"]),
    Setting("workers", Natural | Literal["cores"]),
    Setting("layout", Literal["NCHW", "NHWC"]),
    Setting("update", str),
    Setting("staging", OnOff),
    Setting("pinned", OnOff),
    Setting("validate", Literal["none", "one", "all"]),
    Setting("epoch", Count),
    Setting("learning-rate", _Rate),
    Setting("target", _Share),
    Setting("seed", Natural),
)
"""Options passed to a script unchanged; so is ``gpus``, but [cards] in a study implies it."""

SETTINGS: Final = (Setting("framework", str), Setting("gpus", Count), *OPTIONS)

KINDS: Final = dict(SETTINGS)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; raises InputError for anything else."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InputError(path, f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(path, "is not UTF-8, as TOML is") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(path, f"is not TOML: {error}") from None
    except (RecursionError, ValueError):
        # Limits of Python for nested lists and long numbers, neither of which is valid here.
        problem = "is not TOML of settings: nested too deep, or a number too long"
        raise InputError(path, problem) from None


def convert(path: Path, table: str, value: object, kind: Any) -> Any:
    """Convert a value to a type; raises UsageError with the file and the key."""
    if get_origin(kind) is Literal and isinstance(value, str) and value not in get_args(kind):
        known = nearest(value, get_args(kind))
        raise UsageError(f"{path}: {table}: {value!r} is no value of it; {known}")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `")
        key = where.removesuffix("`").removeprefix("$").removeprefix(".")
        location = " ".join(part for part in (table, key) if part)
        raise UsageError(f"{path}: {location}: {problem[:1].lower()}{problem[1:]}") from None


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the hint for an unknown word: a close match, or all choices."""
    choices = list(known)
    close = get_close_matches(word, choices, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(choices)}"


def check_keys(path: Path, table: str, keys: Iterable[str], known: Iterable[str]) -> None:
    """Raise UsageError for the first unknown key."""
    known = list(known)
    for key in keys:
        if key not in known:
            where = f"in {table}" if table else "at the top"
            raise UsageError(f"{path}: no key {key!r} {where}; {nearest(key, known)}")
