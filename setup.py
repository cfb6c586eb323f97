"""The part of the build that pyproject.toml cannot say: the collector, a plain C library.

It needs any C compiler and no CUDA. Where there is none, gputrace installs without it and can still
read and analyze traces.
"""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("gputrace/collectors/native")

setup(
    ext_modules=[
        Extension(
            "gputrace.collectors._collector",
            sources=[str(path) for path in sorted(NATIVE.glob("*.c"))],
            depends=[str(path) for path in sorted(NATIVE.glob("*.h"))],
            extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden"],
            libraries=["dl", "pthread"],
            optional=True,
        )
    ]
)
