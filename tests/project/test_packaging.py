"""Installed gputrace: its package, its data, its command, its manual.

What is built here is installed into a folder of its own, and used from there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path, PurePosixPath
from typing import Final

import pytest

import gputrace
from tests.helpers import command
from tests.helpers.on_terminal import OnTerminal
from tests.helpers.once import once

ROOT: Final = Path(__file__).parents[2]
LEFT_OUT: Final = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "*.so", "build", "dist")
NAME: Final = f"gputrace-{gputrace.__version__}"
METADATA: Final = f"{NAME}.dist-info"
DATA: Final = f"{NAME}.data"
START: Final = "_gputrace_start.py"
LIBRARIES: Final = {f"gputrace/{name}.so" for name in ("_analysis", "_collector", "_ticker")}
MISSING_HERE: Final = 4

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def run(*words: str | Path, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def dist(common: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive, and the wheel that was built from it, not from here."""
    source = tmp_path_factory.mktemp("packaging") / "source"

    def build(folder: Path) -> None:
        shutil.copytree(ROOT, source, symlinks=True, ignore=LEFT_OUT)
        run("-m", "build", "--no-isolation", "--outdir", folder, source)

    return once(common / "dist", build)


@pytest.fixture(scope="module")
def built(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


def contents(wheel: Path) -> dict[str, bytes]:
    """The wheel's files by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def wheel(built: Path) -> dict[str, bytes]:
    return contents(built)


class Installed:
    """A wheel in a folder of its own, without the checkout; the libraries it needs are ours."""

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.site = Path(sysconfig.get_path("purelib", vars={"base": str(prefix)}))
        path = f"{prefix}/bin:/usr/bin:/bin"
        self.env = {"PYTHONPATH": str(self.site), "PATH": path, "PYTHONNOUSERSITE": "1"}

    def gputrace(self, *arguments: str) -> command.Ran:
        return command.python(str(self.prefix / "bin" / "gputrace"), *arguments, env=self.env)


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    prefix = tmp_path_factory.mktemp("installed")
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile")
    run(*pip, "--ignore-installed", "--prefix", prefix, built)
    return Installed(prefix)


@pytest.fixture(scope="module")
def without_compiler(
    dist: Path,
    wheel: dict[str, bytes],
    installed: Installed,
    tmp_path_factory: pytest.TempPathFactory,
) -> Installed:
    """The wheel that the source archive becomes without a C compiler: the same but for libraries.

    It is copied from the other, with what Python has compiled there.
    """
    folder = tmp_path_factory.mktemp("without")
    (archive,) = dist.glob("*.tar.gz")
    pip = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir")
    run(*pip, "--wheel-dir", folder, archive, env={"CC": "/nowhere/cc"})
    files = contents(folder / f"{NAME}-py3-none-any.whl")
    assert files.keys() == wheel.keys() - LIBRARIES
    assert [name for name in files if METADATA not in name and files[name] != wheel[name]] == []
    left_out = shutil.ignore_patterns("*.so")
    return Installed(shutil.copytree(installed.prefix, folder / "prefix", ignore=left_out))


def package_files() -> set[str]:
    """Files under gputrace/ that a person needs."""
    files = (path.relative_to(ROOT) for path in (ROOT / "gputrace").rglob("*") if path.is_file())
    return {
        path.as_posix()
        for path in files
        if path.suffix in {".py", ".typed"} or (path.parts[1] == "data" and path.suffix != ".pyc")
    }


def test_the_wheel_adds_one_package_and_its_start_to_site_packages(wheel: dict[str, bytes]) -> None:
    assert {PurePosixPath(name).parts[0] for name in wheel} == {"gputrace", START, METADATA, DATA}
    beside = {name for name in wheel if name.startswith(DATA)}
    assert {name for name in beside if not name.startswith(f"{DATA}/data/share/")} == set()


def test_an_installation_adds_the_same_to_site_packages(installed: Installed) -> None:
    assert {path.name for path in installed.site.iterdir()} == {"gputrace", START, METADATA}
    assert {path.name for path in installed.prefix.iterdir()} == {"bin", "lib", "share"}
    assert [path.name for path in (installed.prefix / "bin").iterdir()] == ["gputrace"]


@needs_compiler
def test_one_wheel_serves_every_python_of_a_platform(built: Path, wheel: dict[str, bytes]) -> None:
    assert re.fullmatch(rf"{NAME}-py3-none-linux_\w+\.whl", built.name)
    assert {name for name in wheel if ".so" in name} == LIBRARIES


@needs_compiler
@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_the_libraries_need_the_c_library_alone(installed: Installed, library: str) -> None:
    options = ["readelf", "--wide", "--dynamic", "--dyn-syms", str(installed.site / library)]
    told = subprocess.run(options, capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(\w[\w-]*)\.so", told)
    assert "(SYMTAB)" in told
    assert {*needed} <= {"libc", "libdl", "libpthread", "ld-linux-x86-64", "ld-linux-aarch64"}
    # Neither Python, nor folders of the machine that built them.
    assert not re.search(r" _?Py\w*\b", told)
    assert "PATH)" not in told


def test_the_wheel_holds_every_module_and_data_file(wheel: dict[str, bytes]) -> None:
    assert "gputrace/py.typed" in package_files()
    assert package_files() <= wheel.keys()


@pytest.mark.parametrize("name", ["gputrace", "pathlib", "json", "enum", "numpy", "sitecustomize"])
def test_a_module_on_the_pythonpath_reaches_the_program_and_never_the_recorder(
    installed: Installed, tmp_path: Path, name: str
) -> None:
    """Even one that would end our Python, or is called as the package is."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / f"{name}.py").write_text("ours = True")
    # As in an environment whose `site-packages` has the wheel, and no path to this checkout.
    paths = [theirs, installed.site, sysconfig.get_path("purelib")]
    plain = str(getattr(sys, "_base_executable", sys.executable))
    script = str(installed.prefix / "bin" / "gputrace")
    trace = tmp_path / "trace.sqlite"
    ran = subprocess.run(
        [
            *(plain, script, "record", "--no-nvml", "-o", trace, "--"),
            *(plain, "-c", f"import {name}; print({name}.ours)"),
        ],
        env=installed.env | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "True\n"), ran.stderr
    assert "Traceback" not in ran.stderr
    assert trace.exists()


@pytest.fixture(scope="module")
def spaced(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, whose path has a space; the libraries it needs are ours."""
    folder = tmp_path_factory.mktemp("in a space")
    run("-m", "venv", "--without-pip", folder)
    pip = ("-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-deps")
    run(*pip, "--no-index", "--no-compile", built)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def test_the_command_starts_where_the_environments_path_has_a_space(
    spaced: Path, tmp_path: Path
) -> None:
    (tmp_path / "gputrace.py").write_text("ours = True")
    link = tmp_path / "gputrace"
    link.symlink_to(spaced / "bin" / "gputrace")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    ran = subprocess.run([link, "--version"], env=env, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == f"gputrace, version {gputrace.__version__}\n"


def test_a_python_that_sets_pythonpath_itself_starts_twice_at_most(
    spaced: Path, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(
        # Processes of ours that import nothing are started with -I.
        f'#!/bin/sh\n[ "$1" = -I ] || echo >> {tmp_path}/starts\n'
        f"export PYTHONPATH=/site:$PYTHONPATH\nexec '{spaced}/bin/python' \"$@\"\n"
    )
    python.chmod(0o755)
    script = (
        f"import sys; from _gputrace_start import main\nsys.executable = {str(python)!r}\nmain()\n"
    )
    (tmp_path / "script.py").write_text(script)
    words = ["record", "--no-nvml", "-o", "t.sqlite", "--", sys.executable, "-S", "-c"]
    ran = subprocess.run(
        [python, "script.py", *words, "import os; print(os.environ['PYTHONPATH'])"],
        env=os.environ | {"PYTHONPATH": "/mine"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("/site:/mine\n")
    assert len((tmp_path / "starts").read_text()) == 2


def test_the_wheel_tells_its_licence_and_python(wheel: dict[str, bytes]) -> None:
    metadata = Parser().parsestr(wheel[f"{METADATA}/METADATA"].decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert f"{METADATA}/licenses/LICENSE" in wheel


def test_the_source_archive_holds_what_its_tests_need(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "LICENSE",
        "Makefile",
        "locks/dev.lock",
        "tests/project/test_packaging.py",
    } <= names


def test_the_installed_demo_works(installed: Installed) -> None:
    ran = installed.gputrace("demo")
    assert ran.code == 0, ran.err
    assert ran.out.startswith("The GPUs wait for data 51% of the time (25.1 of 49.0 ms a step).")
    recorded = " ".join(ran.out.split())
    # Not first on a machine whose cores others want.
    waits = r"[Tt]he program waits for data \d+% of each step \([\d.]+ (ms )?of [\d.]+ m?s\)"
    assert re.search(waits, recorded)
    assert "note: Steps are from mark to mark of 'gputrace.step'" in recorded


@needs_compiler
def test_the_installed_doctor_finds_the_collector(installed: Installed) -> None:
    ran = installed.gputrace("doctor")
    assert "\nok      collector: _collector.so\n" in ran.out
    assert ran.err == ""


def test_the_installed_browser_shows_the_demo(installed: Installed) -> None:
    gputrace = [sys.executable, str(installed.prefix / "bin" / "gputrace")]
    terminal = OnTerminal("browse", "--demo", env=installed.env, program=gputrace)
    terminal.until("wait for data")
    terminal.type("q")
    assert terminal.end() == 0


def test_man_finds_the_manual_of_the_command_on_the_path(installed: Installed) -> None:
    if shutil.which("man") is None:
        pytest.skip("needs man")
    env = {name: text for name, text in os.environ.items() if name != "MANPATH"} | installed.env
    where = ["man", "--where", "gputrace-record"]
    found = subprocess.run(where, env=env, capture_output=True, text=True, check=False)
    assert found.stdout == f"{installed.prefix}/share/man/man1/gputrace-record.1\n"


def test_shells_find_their_scripts(installed: Installed) -> None:
    for name, start in (
        ("bash-completion/completions/gputrace", "_gputrace_completion() {"),
        ("zsh/site-functions/_gputrace", "#compdef gputrace"),
        ("fish/vendor_completions.d/gputrace.fish", "function _gputrace_completion;"),
    ):
        assert (installed.prefix / "share" / name).read_text().startswith(start)


def test_without_a_compiler_all_but_the_collector_is_installed(without_compiler: Installed) -> None:
    ran = without_compiler.gputrace("doctor")
    assert ran.code == MISSING_HERE
    (line,) = re.findall(r"^missing collector: .*", ran.out, re.M)
    assert line.startswith("missing collector: not built; install a C compiler")
    assert without_compiler.gputrace("demo", "--no-record").out.startswith(
        "The GPUs wait for data 51% of"
    )


def test_without_a_compiler_what_needs_it_says_so(without_compiler: Installed) -> None:
    for options in (["--backend", "cupti"], ["--backend", "host", "--python"]):
        ran = without_compiler.gputrace("record", *options, "--", "true")
        command.assert_refused(ran, 125, "C compiler", "--no-cache-dir")


def test_the_conda_recipe_asks_for_what_the_wheel_asks_for() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    recipe = (ROOT / ".ci" / "conda" / "recipe.yaml").read_text()
    (run,) = re.findall(r"^  run:\n((?:    - .*\n)+)", recipe, re.M)
    needs = run.replace(" ", "").splitlines()
    asked = [f"python{project['requires-python']}", *project["dependencies"]]
    assert needs == [f"-{one}" for one in asked]
    assert f'version: "{gputrace.__version__}"\n' in recipe
