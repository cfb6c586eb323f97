"""CNTK: steps, and waits for its sources."""

from __future__ import annotations

from typing import Final

from tests.helpers.programs import Program, check_steps, event_names


def test_steps_of_a_trainer_are_recorded(program: Program) -> None:
    mark = "cntk.Trainer.train_minibatch"
    check_steps(program, "cntk.train.trainer", "Trainer", "train_minibatch", mark)


CNTK_IO: Final = """
class MinibatchSource:
    def next_minibatch(self, size, input_map=None): return {"size": size, "map": input_map}
class UserMinibatchSource:
    def __init__(self): self.made = True
    def _next_minibatch(self, info_map, size): info_map.update(self.next_minibatch(size, 1, 0))
class MinibatchSourceFromData(UserMinibatchSource):
    def next_minibatch(self, size, number_of_workers=1, worker_rank=0): return {"size": size}
"""


def test_waits_for_sources_in_c_and_in_python_are_recorded(
    program: Program,
) -> None:
    program.write({"cntk/io/__init__.py": CNTK_IO})
    out = program.quietly(
        "from cntk import io\n"
        "class Own(io.UserMinibatchSource):\n"
        "    def next_minibatch(self, size, number_of_workers, worker_rank): return {}\n"
        "print(io.MinibatchSource().next_minibatch(2, input_map=3))\n"
        "for source in (io.MinibatchSourceFromData(), Own(), Own()):\n"
        "    batch = {}\n"
        "    source._next_minibatch(batch, 4)\n"
        "    print(source.made, batch)\n"
    )
    batches = ["{'size': 2, 'map': 3}", "True {'size': 4}", "True {}", "True {}"]
    assert out.splitlines() == batches
    sources = ["cntk.io.MinibatchSource", "cntk.io.MinibatchSourceFromData", *["__main__.Own"] * 2]
    assert event_names(program.events(), "data_wait") == sources
