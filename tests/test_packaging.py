"""What a person gets who installs gputrace: its package, its data, its command, nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path, PurePosixPath
from typing import Final

import pytest

import gputrace

ROOT: Final = Path(__file__).parents[1]
LEFT_OUT: Final = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "*.so", "build", "dist")
METADATA: Final = f"gputrace-{gputrace.__version__}.dist-info"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive, and the wheel that was built from it, not from here."""
    source = tmp_path_factory.mktemp("packaging") / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=LEFT_OUT)
    build = [sys.executable, "-m", "build", "--no-isolation", str(source)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> dict[str, bytes]:
    """The wheel's files by name."""
    (path,) = dist.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def package_files() -> set[str]:
    """Files under gputrace/ that a person needs."""
    files = (path.relative_to(ROOT) for path in (ROOT / "gputrace").rglob("*") if path.is_file())
    return {
        path.as_posix()
        for path in files
        if path.suffix in {".py", ".typed"} or path.parts[1] == "data"
    }


def test_the_wheel_adds_one_package_to_site_packages(wheel: dict[str, bytes]) -> None:
    assert {PurePosixPath(name).parts[0] for name in wheel} == {"gputrace", METADATA}


def test_the_wheel_holds_every_module_and_data_file(wheel: dict[str, bytes]) -> None:
    assert "gputrace/py.typed" in package_files()
    assert package_files() <= wheel.keys()


def test_the_wheel_installs_the_command(wheel: dict[str, bytes]) -> None:
    entry_points = wheel[f"{METADATA}/entry_points.txt"].decode()
    assert "gputrace = gputrace.cli:main" in entry_points.splitlines()


def test_the_wheel_tells_its_licence_and_python(wheel: dict[str, bytes]) -> None:
    metadata = Parser().parsestr(wheel[f"{METADATA}/METADATA"].decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert f"{METADATA}/licenses/LICENSE" in wheel


def test_the_source_archive_holds_what_its_tests_need(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "Makefile", "requirements-dev.lock", "tests/test_packaging.py"} <= names
