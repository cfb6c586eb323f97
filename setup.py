"""The part of the build that pyproject.toml cannot say: two plain C libraries.

They need any C compiler and no CUDA. Where there is none, gputrace installs without them and can
still read and analyze traces.
"""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("gputrace/collectors/native")


def library(name: str, folder: Path) -> Extension:
    """The library of the C files in a folder."""
    return Extension(
        f"gputrace.collectors.{name}",
        sources=[str(path) for path in sorted(folder.glob("*.c"))],
        depends=[str(path) for path in sorted(folder.glob("*.h"))],
        extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden"],
        libraries=["dl", "pthread"],
        optional=True,
    )


setup(ext_modules=[library("_collector", NATIVE), library("_ticker", NATIVE / "ticker")])
