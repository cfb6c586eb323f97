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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin

import msgspec
from msgspec.structs import replace
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from gputrace.errors import InputError, UsageError
from gputrace.model.struct import Struct

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


class Unavailable(Exception):
    """Error for a framework that no Python can run; the message is one line."""


_MARK: Final = "gputrace.json"
_OLDEST, _NEWEST = 6, 30
"""Minor versions of Python 3 that are looked for on the PATH."""


class Environments(Struct, frozen=True):
    """Lookup of each framework's Python."""

    named: Mapping[str, Path]
    """Pythons that the user named, by framework."""
    installer: str | None
    """``pip`` or ``uv``; None to install nothing, and use only what exists."""
    log: Callable[[str], None]
    """Called with a line before something takes long."""
    _pythons: dict[str, Path | Unavailable] = msgspec.field(default_factory=dict)

    def find(self, framework: Framework) -> Path:
        """Return the Python of a framework; raises Unavailable, each time for the same reason."""
        if framework.name not in self._pythons:
            try:
                self._pythons[framework.name] = self._find(framework)
            except Unavailable as error:
                self._pythons[framework.name] = error
        python = self._pythons[framework.name]
        if isinstance(python, Unavailable):
            raise python
        return python

    def _find(self, framework: Framework) -> Path:
        name, script = framework.name, framework.script.name
        command = [sys.executable, "-c", _LOAD, *framework.libraries]
        if framework.libraries and (missing := _output(command).split()):
            advice = f"{script} says in its head how to have them"
            raise Unavailable(f"this machine lacks {', '.join(missing)}; {advice}")
        if name in self.named:
            path = self.named[name]
            python = shutil.which(path / "bin" / "python" if path.is_dir() else path)
            if python is None:
                raise Unavailable(f"--python {name}={path}: no such program")
            if missing := _missing(Path(python), framework):
                raise Unavailable(f"--python {name}={path}: lacks {', '.join(missing)}")
            return Path(python).absolute()
        missing = _missing(Path(sys.executable), framework)
        if not missing:
            return Path(sys.executable)
        made = self._install(framework)
        if made is None:
            raise Unavailable(
                f"this Python lacks {', '.join(missing)}; --install makes an environment, "
                f"--python {name}=PATH names one"
            )
        if missing := _missing(made, framework):
            raise Unavailable(f"the environment that {script} asks for lacks {', '.join(missing)}")
        return made

    def _install(self, framework: Framework) -> Path | None:
        """Return the Python of an environment in the cache, which the installer makes if need be.

        Without an installer, None unless pip or uv made one before.
        """
        if self.installer is None:
            for installer in ("pip", "uv"):
                with suppress(ValueError):
                    made = _Environment(framework, installer)
                    if made.exists:
                        return made.inside
            return None
        try:
            environment = _Environment(framework, self.installer)
            folder = environment.folder
            folder.parent.mkdir(parents=True, exist_ok=True)
            with folder.with_suffix(".lock").open("w", encoding="utf-8") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self.log(f"{folder}: being made; waiting")
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if not environment.exists:
                    self.log(f"{framework.name}: making an environment in {folder}")
                    environment.make()
        except (OSError, ValueError) as error:
            raise Unavailable(f"cannot be installed: {error}") from None
        return environment.inside


def _missing(python: Path, framework: Framework) -> list[str]:
    """Return the modules that a Python lacks; raises Unavailable if it does not run."""
    command = [str(python), "-c", _ASK, str(framework.script.parent), *framework.modules]
    try:
        return _output(command, timeout=60, check=True).split()
    except (OSError, subprocess.SubprocessError):
        raise Unavailable(f"{python}: not a Python 3 that runs") from None


def _output(command: Sequence[str], timeout: float | None = None, check: bool = False) -> str:
    options: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return str(subprocess.run(command, timeout=timeout, check=check, **options).stdout)


class _Environment:
    """Environment of a framework in the cache, made or not; its name is a hash of all inputs.

    The output of the installer is in a log beside it.
    """

    def __init__(self, framework: Framework, installer: str) -> None:
        """Raise ValueError with one line if the framework's needs cannot be met."""
        from gputrace.store.cache import cache_folder

        needs = read_needs(framework.script)
        self._installer, self._constraints = installer, needs.constraints
        requirements = [*needs.dependencies, *framework.requires]
        if not requirements:
            raise ValueError(f"{framework.script.name} has no header that names its dependencies")
        self._python = _base_python(needs.python, installer)
        self._prepare = framework.prepare
        made_of: list[object] = [requirements, *needs[1:], self._python, installer]
        if self._prepare is not None:
            made_of.append(self._prepare.read_text(encoding="utf-8"))
        self._made_of = json.dumps(made_of)
        package = re.split(r"[^\w.-]", requirements[0], maxsplit=1)[0]
        name = f"{package}-{hashlib.sha256(self._made_of.encode()).hexdigest()[:12]}"
        self._requirements, self._unbuilt = requirements, needs.unbuilt
        self.folder = cache_folder() / "environments" / name
        self.inside = self.folder / "bin" / "python"
        self._log = self.folder.with_suffix(".log")

    @property
    def exists(self) -> bool:
        return (self.folder / _MARK).exists()

    def make(self) -> None:
        """Make the environment; raises ValueError with one line if a step fails."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._log.write_bytes(b"")
        file = self.folder.with_suffix(".constraints")
        if self._constraints:
            file.write_text("\n".join(self._constraints) + "\n", encoding="utf-8")
        if self._installer == "uv":
            uv = [program] if (program := shutil.which("uv")) else [sys.executable, "-m", "uv"]
            if not program and find_spec("uv") is None:
                raise ValueError("uv is neither on the PATH nor in this Python; `pip install uv`")
            # With pip, for what prepares it.
            self._run([*uv, "venv", "--seed", "--python", self._python, str(self.folder)])
            install = [*uv, "pip", "install", "--python", str(self.inside)]
            install += ["--build-constraints", str(file)] if self._constraints else []
            self._run([*install, *self._prepared()])
        else:
            self._run([self._python, "-m", "venv", str(self.folder)])
            pip = [str(self.inside), "-m", "pip", "--disable-pip-version-check", "install"]
            # The pip of an old Python may not know current wheels; keep it without a newer one.
            with suppress(ValueError):
                self._run([*pip, "--upgrade", "pip"])
            # pip reads the constraints of builds from the first variable before 25.3.
            names = ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT") if self._constraints else ()
            variables = {name: f"{os.environ.get(name, '')} {file}".strip() for name in names}
            # Modules are compiled on import; all would double the time and take a third more space.
            self._run([*pip, "--no-compile", *self._prepared()], variables)
        (self.folder / _MARK).write_text(self._made_of, encoding="utf-8")

    def _prepared(self) -> list[str]:
        """Return what is to be installed, once the framework's program has made it possible.

        That is called with a folder for wheels, which outlives the environment, and requirements.
        """
        options = [f"--only-binary={name}" for name in self._unbuilt]
        if self._prepare is not None:
            wheels = self.folder.with_suffix(".wheels")
            wheels.mkdir(exist_ok=True)
            self._run([str(self.inside), str(self._prepare), str(wheels), *self._requirements])
            options.append(f"--find-links={wheels}")
        return [*self._requirements, *options]

    def _run(self, command: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        """Run a command; raises ValueError with the most informative line of its output."""
        with self._log.open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            environment = {**os.environ, **(variables or {})}
            code = subprocess.call(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        if code:
            text = self._log.read_text(errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            errors = [line for line in lines if line.lower().startswith(("error:", "× "))]
            raise ValueError(f"{(errors or lines)[-1]} (see {self._log})")


def _base_python(wanted: str, installer: str) -> str:
    """Return a Python that meets ``requires-python``: this one, or the newest of PATH and pyenv.

    Links are resolved, so that virtual environments of one base Python share environments.
    """
    current = str(Path(sys.executable).resolve())
    try:
        fits = SpecifierSet(wanted)
    except InvalidSpecifier:
        raise ValueError(f"requires-python {wanted!r} is not a version specifier") from None
    if installer == "uv":
        return wanted or current  # uv searches by itself, and may download one.
    if fits.contains(".".join(map(str, sys.version_info[:3])), prereleases=True):
        return current
    code = "import sys, venv; print('.'.join(map(str, sys.version_info[:3])))"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    for minor in range(_NEWEST, _OLDEST - 1, -1):
        on_path = shutil.which(f"python3.{minor}")
        for program in filter(None, (on_path, *pyenv.glob(f"3.{minor}.*/bin/python"))):
            # A Python that does not run has version 0, which meets no specifier.
            version = _output([str(program), "-c", code]).strip() or "0"
            if fits.contains(version, prereleases=True):
                return str(program)
    raise ValueError(f"needs Python {wanted}, and there is none on the PATH or pyenv's")


FILE: Final = "frameworks.toml"
_HEADER: Final = "# /// script"
"""Line that begins the header of a script, commented lines up to ``# ///``."""


class Framework(Struct, frozen=True):
    """Entry of frameworks.toml."""

    name: str
    title: str
    script: Path
    arguments: tuple[str, ...] = ()
    """Arguments of the script, before those of a study."""
    modules: tuple[str, ...] = ()
    """Modules that its Python must have."""
    libraries: tuple[str, ...] = ()
    """Shared libraries of the machine that it loads."""
    requires: tuple[str, ...] = ()
    """Requirements beyond those of the script's header."""
    prepare: Path | None = None
    """Program that makes a new environment fit for what no installer can do by itself."""
    updates: tuple[str, ...] = ()
    """Supported placements; empty if not declared."""


class Needs(NamedTuple):
    """Requirements in a script's header (PEP 723)."""

    dependencies: tuple[str, ...] = ()
    python: str = ""
    """Version specifier, as ``>=3.8,<3.12``; empty for any."""
    constraints: tuple[str, ...] = ()
    """Build constraints."""
    unbuilt: tuple[str, ...] = ()
    """Packages that are installed only from wheels."""


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
            check_keys(path, f"[{name}]", table, Framework.__struct_fields__[1:])
            table = table | {"name": name}
        entry: Framework = convert(path, f"[{name}]", table, Framework)
        prepare = None if entry.prepare is None else path.parent / entry.prepare
        frameworks[name] = replace(entry, script=path.parent / entry.script, prepare=prepare)
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
        lines = script.read_text(encoding="utf-8").splitlines()
        after = lines[lines.index(_HEADER) + 1 :] if _HEADER in lines else []
        header = takewhile(lambda line: line.startswith("#") and line != "# ///", after)
        table: dict[str, Any] = tomllib.loads("\n".join(line[2:] for line in header))
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


_LARGEST: Final = (1 << 63) - 1
Count = Annotated[int, msgspec.Meta(ge=1, le=_LARGEST)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
_Rate = Annotated[float, msgspec.Meta(gt=0)]
_Share = Annotated[float, msgspec.Meta(gt=0, lt=1)]
OnOff = bool | Literal["on", "off"]
_Models = Literal[
    "resnet20", "resnet44", "resnet110", "resnet50", "inception3", "densenet121", "alexnet"
]

GENERATED: Final = ("png", "jpeg")
"""Values of ``data`` for images that are generated for the study."""

CORES: Final = "cores"
"""Value of ``workers`` for the number of cores of the machine that runs it."""


LAUNCHERS: Final = {
    **dict.fromkeys(("ddp", "fsdp2", "pipeline", "tensor", "accumulate"), "torchrun"),
    **dict.fromkeys(("horovod", "chainermn"), "mpi"),
}
"""Placements with a process per GPU, and the launcher for several machines."""


OPTIONS: Final[Mapping[str, Any]] = {
    "model": _Models,
    "batch": Count,
    "steps": Count,
    "warmup": Natural,
    "data": str,
    "device": Literal["auto", "cuda", "cpu"],
    "workers": Natural | Literal["cores"],
    "layout": Literal["NCHW", "NHWC"],
    "update": str,
    "staging": OnOff,
    "pinned": OnOff,
    "validate": Literal["none", "one", "all"],
    "epoch": Count,
    "learning-rate": _Rate,
    "target": _Share,
    "seed": Natural,
}
"""Type of each option passed to a script unchanged; so is ``gpus``, but [cards] implies it."""

KINDS: Final[Mapping[str, Any]] = {"framework": str, "gpus": Count, **OPTIONS, "cures": str}
"""Type of each setting of a study."""


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
        raise UsageError(f"{path}: {table}: {value!r} is not a value of it; {known}")
    try:
        # The only type that msgspec does not know is Path.
        return msgspec.convert(
            value, kind, dec_hook=lambda _, text: Path(msgspec.convert(text, str))
        )
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
