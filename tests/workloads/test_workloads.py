"""The workload scripts without their frameworks; `make workloads` records each with its own."""

from __future__ import annotations

from typing import Final

import pytest

from gputrace.studies.framework_environments import read_frameworks
from tests.helpers import command

WORKLOADS: Final = command.ROOT / "workloads"
FRAMEWORKS: Final = read_frameworks(WORKLOADS / "frameworks.toml")
WITHOUT_FRAMEWORKS: Final = """
import importlib.machinery, runpy, sys

class Any(type):
    __version__ = "2.0" if "mxnet2" in sys.argv[1] else "1.0"
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return self
    def __call__(self, *arguments, **options): return self
    def __iter__(self): return iter(())
    def __len__(self): return 0
    def __add__(self, other): return self

class Stubs:
    '''Finds a module for each name that has none, whose names are all the same class.'''
    thing = Any("thing", (), {})
    def find_spec(self, name, path=None, target=None):
        if name in sys.stdlib_module_names: return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec): return None
    def exec_module(self, module): module.__getattr__ = lambda name: getattr(self.thing, name)

sys.meta_path.append(Stubs())
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script with modules that stand for those which are not installed."""


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_what_a_script_cannot_do_is_told_in_one_line(name: str) -> None:
    script, *words = str(FRAMEWORKS[name].script), *FRAMEWORKS[name].arguments
    options = ("--device", "cpu", "--steps", "3", "--warmup", "3")
    ran = command.python("-c", WITHOUT_FRAMEWORKS, script, *words, *options)
    assert ran.code == 2, ran.err
    assert ran.err.splitlines()[-1].startswith(f"{FRAMEWORKS[name].script.name}: error: --")
    assert "Traceback" not in ran.err
