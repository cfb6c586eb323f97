"""Triton: compilations of kernels and searches for their fastest configuration."""

from __future__ import annotations

from typing import Final

from tests.helpers.programs import Program, event_names

TRITON: Final = {
    "triton/compiler/compiler.py": "def compile(src, target=None): return src.fn.__name__\n",
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
