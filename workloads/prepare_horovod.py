"""Build the wheel of Horovod, of which there is none: `gputrace bench --install` calls this.

    python prepare_horovod.py WHEELS REQUIREMENT...

PyTorch and the other requirements are installed into the environment of this Python first. Horovod
0.28.1 asks the compiler for C++ 14, but PyTorch's headers need 20 and the rest 17: a wrapper has
the last word. The wheel is left in WHEELS, and taken from there another time.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

WRAPPER = """#!/bin/sh
case "$*" in
  */torch/include*) exec {compiler} "$@" -std=c++20 ;;
  *) exec {compiler} "$@" -std=c++17 ;;
esac
"""
TO_BUILD = ["setuptools<81", "wheel", "cloudpickle", "psutil", "pyyaml", "packaging", "cffi"]
ONLY_TORCH = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
}


def main(folder, *requirements):
    wheels = Path(folder)
    if list(wheels.glob("horovod-*.whl")):
        return
    compiler = os.environ.get("CXX") or shutil.which("g++")
    for program, name in ((compiler, "a C++ compiler (g++)"), (shutil.which("cmake"), "cmake")):
        if not program:
            sys.exit(f"error: Horovod is built from source, and there is no {name} here")
    ours = [one for one in requirements if one.startswith("horovod")]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    others = [one for one in requirements if one not in ours]
    subprocess.check_call([*pip, "install", "--no-compile", *others, *TO_BUILD])
    wrapper = wheels / "cxx"
    wrapper.write_text(WRAPPER.format(compiler=compiler))
    wrapper.chmod(0o755)
    subprocess.check_call(
        [*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", folder, *ours],
        env={"MAKEFLAGS": "-j2", **os.environ, **ONLY_TORCH, "CXX": str(wrapper.resolve())},
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
