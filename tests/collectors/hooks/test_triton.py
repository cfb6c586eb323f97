"""Triton: compilations of kernels and searches for their fastest configuration."""

from __future__ import annotations

from typing import Final

from tests.helpers.programs import Program, event_names

TRITON: Final = {
    "triton/compiler/compiler.py": """
def compile(src, target=None): return src.fn.__name__
class CompiledKernel:
    def __init__(self, src, name):
        self.src, self.metadata = src, type("Metadata", (), {"name": name})
""",
    "triton/runtime/autotuner.py": """
from triton.compiler.compiler import compile
class Autotuner:
    def __init__(self, fn): self.fn = fn
    def _bench(self, *args, config): return compile(self) + config
""",
}


def test_compilations_and_searches_are_recorded_from_the_first_step_on(program: Program) -> None:
    program.write(TRITON)
    out = program.quietly(
        "import gputrace\n"
        "from triton.compiler import compiler\n"
        "from triton.runtime.autotuner import Autotuner\n"
        "def add(): pass\n"
        "tuner = Autotuner(add)\n"
        "for _ in range(2):\n"
        "    print(compiler.compile(tuner, target=1), tuner._bench(config='!'))\n"
        "    gputrace.step()\n"
    )
    assert out == "add add!\n" * 2
    names = event_names(program.events(), "compilation")
    assert names == ["Triton add", "Triton's search for add"]


def test_where_kernels_are_defined_that_are_loaded_is_recorded(program: Program) -> None:
    """Those of Inductor's are told where they are launched; other languages have no function."""
    program.write(TRITON)
    program.quietly(
        "from triton.compiler.compiler import CompiledKernel\n"
        "class Jit:\n"
        "    def __init__(self, fn, module): self.fn, self.__module__ = fn, module\n"
        "class Source:\n"
        "    def __init__(self, *of): self.fn = Jit(*of)\n"
        "def softmax(): pass\n"
        "CompiledKernel(Source(softmax, '__main__'), 'softmax_0')\n"
        "CompiledKernel(Source(softmax, 'torch._inductor.runtime.x'), 'triton_poi_0')\n"
        "CompiledKernel(object(), 'of_ttir')\n"
    )
    expected = f"softmax_0 at {program.folder / 'main.py'}:6 softmax"
    assert event_names(program.events(), "source") == [expected]
