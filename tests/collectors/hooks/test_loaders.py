"""Loaders of no framework: waits for their batches, their settings, and their queues."""

from __future__ import annotations

from typing import Final

import pytest

from tests.helpers.programs import Program, check_waits, event_names


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("ffcv.loader.epoch_iterator", "EpochIterator"),
        ("nvidia.dali.plugin.jax.iterator", "DALIGenericIterator"),
        ("nvidia.dali.plugin.pytorch", "DALIGenericIterator"),
    ],
)
def test_waits_for_batches_are_recorded(program: Program, module: str, name: str) -> None:
    check_waits(program, module, name)


WITHIN: Final = """
class Node:
    left = 2
    def __iter__(self): return self
    def __next__(self):
        if not self.left: raise StopIteration
        self.left -= 1
        return self.left
class {name}(Node):
    pass
"""


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torchdata.nodes.loader", "LoaderIterator"),
        ("grain._src.python.data_loader", "DataLoaderIterator"),
    ],
)
def test_of_a_chain_of_loaders_only_the_last_is_waited_for(
    program: Program, module: str, name: str
) -> None:
    program.write({module.replace(".", "/") + ".py": WITHIN.format(name=name)})
    source = f"from {module} import {name}, Node\nprint(list({name}()), list(Node()))"
    assert program.quietly(source) == "[1, 0] [1, 0]\n"
    assert event_names(program.events(), "data_wait") == [f"{module}.{name}"] * 3


NODES: Final = {
    "torchdata/nodes/loader.py": """
import queue
class Node: pass
class LoaderIterator:
    def __init__(self, root): self.root = root
    def __next__(self): return self.next()
    def next(self): return self.root._it._q.get()
""",
}


def test_the_settings_and_the_queue_of_torchdatas_nodes_are_recorded(program: Program) -> None:
    program.write(NODES)
    out = program.quietly(
        "import gputrace, queue\n"
        "from torchdata.nodes.loader import LoaderIterator, Node\n"
        "def decode(): pass\n"
        "mapper, last, held = Node(), Node(), Node()\n"
        "mapper.num_workers, mapper.map_fn, mapper.method = 3, decode, 'thread'\n"
        "last.source, last.prefetch_factor, last._it, held._q = mapper, 2, held, queue.Queue()\n"
        "items = LoaderIterator(last)\n"
        "gputrace.step()\n"
        "for n in range(3): held._q.put(n)\n"
        "print(next(items), next(items))\n"
        "LoaderIterator(last)\n"
        "gputrace.step()\n"
    )
    assert out == "0 1\n"
    events = program.events()
    rows = events.records["loader"]
    told = [(events.names[int(row["name"])], int(row["number"])) for row in rows]
    assert told[1:] == [
        ("torchdata.nodes|Node|prefetch_factor", 2),
        ("torchdata.nodes|Node decode (thread)|num_workers", 3),
        ("ready", 3),
        ("ready", 2),
    ]


def test_a_node_of_the_program_may_have_any_queue(program: Program) -> None:
    program.write(NODES)
    out = program.quietly(
        "from torchdata.nodes.loader import LoaderIterator, Node\n"
        "class Own:\n"
        "    n = 0\n"
        "    def __bool__(self): raise ValueError('the truth value is ambiguous')\n"
        "    def get(self): self.n += 1; return self.n\n"
        "class Counted(Own):\n"
        "    def qsize(self): raise NotImplementedError\n"
        "for queue in Own(), Counted():\n"
        "    last = Node()\n"
        "    last._it = Node()\n"
        "    last._it._q = queue\n"
        "    items = LoaderIterator(last)\n"
        "    print(next(items), next(items))\n"
    )
    assert out == "1 2\n1 2\n"
