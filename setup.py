"""The part of the build that pyproject.toml cannot say: plain C libraries, and manual pages.

The libraries need any C compiler and no CUDA. Where there is none, gputrace installs without them
and can still read and analyze traces, more slowly.
"""

import sys
from importlib import import_module
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext


def library(name: str, *folders: str) -> Extension:
    """The library of the C files in some folders of the package."""
    files = [file for folder in folders for file in sorted(Path("gputrace", folder).glob("*.[ch]"))]
    return Extension(
        f"gputrace.{name}",
        sources=[str(file) for file in files if file.suffix == ".c"],
        depends=[str(file) for file in files if file.suffix == ".h"],
        extra_compile_args=[
            "-std=gnu11",
            "-O2",
            "-g0",
            "-Wall",
            "-Wextra",
            "-fvisibility=hidden",
            "-fwrapv",
        ],
        libraries=["dl", "pthread"],
        optional=True,
    )


class Libraries(build_ext):
    """They use nothing of Python, so that one name does for all of its versions."""

    def build_extensions(self) -> None:
        # Without the folders of the Python that builds, which no other machine has.
        linker = self.compiler.linker_so
        self.compiler.linker_so = [word for word in linker if not word.startswith("-Wl,-rpath")]
        super().build_extensions()

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"


class Wheel(bdist_wheel):
    """One serves every Python of a platform; every platform, where no library could be built."""

    def get_tag(self) -> tuple[str, str, str]:
        libraries = self.get_finalized_command("build_ext").get_outputs()
        is_native = any(Path(path).exists() for path in libraries)
        return "py3", "none", super().get_tag()[2] if is_native else "any"


class Build(build):
    """Makes the manual pages and the scripts of shells, which the commands themselves tell."""

    def run(self) -> None:
        super().run()
        sys.path.insert(0, str(Path(__file__).parent))
        files = import_module("gputrace.cli.installation").shared_files()
        self.distribution.data_files = []
        for name, text in files.items():
            path = Path(self.build_base, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            self.distribution.data_files.append((str(Path(name).parent), [str(path)]))


setup(
    ext_modules=[
        library("_collector", "collectors/native"),
        library("_ticker", "collectors/native/ticker"),
        library(
            "_analysis",
            *("model/native", "store/native", "readers/native", "analyzers/whatif/native"),
        ),
    ],
    cmdclass={"bdist_wheel": Wheel, "build": Build, "build_ext": Libraries},
)
