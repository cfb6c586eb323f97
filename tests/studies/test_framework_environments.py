"""Environments that a script's header asks for: found, made once, or why they cannot be."""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from gputrace.errors import InputError
from gputrace.studies.framework_environments import (
    Environments,
    Framework,
    Needs,
    Unavailable,
    _Environment,
    read_needs,
)

HEADER = """
# /// script
# requires-python = ">=3.8"
# dependencies = [
#     "{}",
# ]
#
# [tool.uv]
# build-constraint-dependencies = ["setuptools<81"]
# ///
import sys
"""


def framework(folder: Path, requirement: str, *requires: str) -> Framework:
    script = folder / "train.py"
    script.write_text(HEADER.format(requirement))
    return Framework("own", "Own", script, modules=("own_module",), requires=requires)


def wheel(folder: Path) -> str:
    """A requirement that is met without an index."""
    path = folder / "own-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("own_module.py", "")
        archive.writestr(
            "own-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: own\nVersion: 1.0\n"
        )
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr("own-1.0.dist-info/WHEEL", tags)
        archive.writestr("own-1.0.dist-info/RECORD", "")
    return f"own @ {path.as_uri()}"


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return folder / "gputrace" / "environments"


@pytest.fixture
def linked_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives environments the pip that is here: Python takes seconds to install and compile one.

    No index has a newer one, which pip takes seconds to find out.
    """
    spec, run = find_spec("pip"), _Environment._run
    if spec is None or spec.origin is None:
        return
    installed = Path(spec.origin).parents[1]

    def run_linked(
        self: _Environment, command: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> None:
        if "--upgrade" in command:
            raise ValueError("no index")
        if command[1:3] != ["-m", "venv"]:
            run(self, command, variables)
            return
        run(self, [*command, "--without-pip"])
        (site,) = self.folder.glob("lib/python*/site-packages")
        for path in (installed / "pip", *installed.glob("pip-*.dist-info")):
            (site / path.name).symlink_to(path)

    monkeypatch.setattr(_Environment, "_run", run_linked)


def find(own: Framework, told: list[str]) -> Path:
    return Environments({}, "pip", told.append).find(own)


def test_a_header_says_what_a_script_needs(tmp_path: Path) -> None:
    script = framework(tmp_path, "torch==2.13.0").script
    assert read_needs(script) == Needs(("torch==2.13.0",), ">=3.8", ("setuptools<81",))
    script.write_text("import torch\n")
    assert read_needs(script) == Needs()
    script.write_text("# /// script\n# dependencies = [\n# ///\n")
    with pytest.raises(InputError, match=r"train\.py: its header is not TOML"):
        read_needs(script)


@pytest.mark.usefixtures("linked_pip")
def test_an_environment_is_made_once_for_equal_needs(
    tmp_path: Path, environments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, told = framework(tmp_path, wheel(tmp_path)), list[str]()
    python = find(own, told)
    assert python.parents[2] == environments
    assert told == [f"own: making an environment in {python.parents[1]}"]
    assert (find(own, told), len(told)) == (python, 1)
    assert find(replace(own, libraries=("libc.so.6",)), told) == python
    with pytest.raises(Unavailable) as caught:
        find(replace(own, libraries=("libc.so.6", "libnone.so.1", "libnone.so.2")), told)
    lacking = "this machine lacks libnone.so.1, libnone.so.2; train.py says in its head"
    assert str(caught.value) == f"{lacking} how to have them"
    assert find(replace(own, name="other", arguments=("--other",)), told) == python
    assert [path.name for path in environments.iterdir() if path.is_dir()] == [
        python.parents[1].name
    ]
    # It is found without --install too, once it is there, and by another environment's Python.
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert Environments({}, None, told.append).find(own) == python
    with pytest.raises(Unavailable, match="lacks own_module; --install makes an environment"):
        Environments({}, None, told.append).find(replace(own, requires=("more",)))


@pytest.mark.usefixtures("environments", "linked_pip")
def test_what_a_header_wants_no_build_of_is_not_built(tmp_path: Path) -> None:
    """pip would build something of any source that calls itself by that name."""
    own = framework(tmp_path, "own==1.0")
    with tarfile.open(tmp_path / "own-1.0.tar.gz", "w:gz") as archive:
        for name, text in {"PKG-INFO": "Name: own\nVersion: 1.0\n", "setup.py": ""}.items():
            file = tarfile.TarInfo(f"own-1.0/{name}")
            file.size = len(text)
            archive.addfile(file, io.BytesIO(text.encode()))
    header = own.script.read_text().replace("build-c", 'no-build-package = ["own"]\n# build-c')
    own.script.write_text(header)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_FIND_LINKS", str(tmp_path))
        with pytest.raises(Unavailable, match=r"No matching distribution found for own==1\.0"):
            find(own, [])


@pytest.mark.usefixtures("linked_pip")
def test_a_program_prepares_what_the_installer_cannot(tmp_path: Path, environments: Path) -> None:
    """Here it makes the wheel that no index has; it is kept when the environment is made anew."""
    made = wheel(tmp_path).partition(" @ ")[2].removeprefix("file://")
    own = framework(tmp_path, "own==1.0")
    prepare = tmp_path / "prepare.py"
    prepare.write_text(
        "import pathlib, shutil, sys\n"
        "assert sys.argv[2:] == ['own==1.0'], sys.argv\n"
        f"assert pathlib.Path(sys.prefix).parent == pathlib.Path({str(environments)!r})\n"
        f"shutil.copy({made!r}, sys.argv[1])\n"
    )
    python = find(replace(own, prepare=prepare), [])
    assert list(python.parents[1].with_suffix(".wheels").iterdir()) != []
    prepare.write_text("raise SystemExit('error: no compiler')")
    with pytest.raises(Unavailable, match="cannot be installed: error: no compiler"):
        find(replace(own, prepare=prepare), [])


def test_no_python_that_a_header_asks_for(
    tmp_path: Path, environments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = framework(tmp_path, "torch")
    own.script.write_text(own.script.read_text().replace(">=3.8", "<3"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        Unavailable, match="needs Python <3, and there is none on the PATH or pyenv's"
    ):
        find(own, [])
    own.script.write_text(own.script.read_text().replace("<3", "new"))
    with pytest.raises(Unavailable, match="requires-python 'new' is not a version specifier"):
        find(own, [])
    own.script.write_text("")
    with pytest.raises(Unavailable, match=r"train\.py has no header that names its dependencies"):
        find(own, [])


def test_the_newest_python_that_fits_is_taken_and_what_goes_wrong_is_told(
    tmp_path: Path, environments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for minor, version in ((6, "3.6.15"), (8, "3.8.18"), (9, "3.9.1")):
        program = tmp_path / f"python3.{minor}"
        fails = 'echo "ERROR: no space left"; echo "see above"; exit 7'
        program.write_text(f'#!/bin/sh\nif [ "$2" = venv ]; then {fails}; fi\necho {version}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    own = framework(tmp_path, "torch")
    own.script.write_text(own.script.read_text().replace(">=3.8", ">=3.6,<3.9"))
    with pytest.raises(Unavailable) as caught:
        find(own, [])
    (log,) = environments.glob("*.log")
    assert str(caught.value) == f"cannot be installed: ERROR: no space left (see {log})"
    assert log.read_text().startswith(f"$ {tmp_path}/python3.8 -m venv {log.with_suffix('')}\n")
    assert log.with_suffix(".constraints").read_text() == "setuptools<81\n"
    # Half an environment has no mark, and is made anew.
    told = list[str]()
    with pytest.raises(Unavailable):
        find(own, told)
    assert told == [f"own: making an environment in {log.with_suffix('')}"]
