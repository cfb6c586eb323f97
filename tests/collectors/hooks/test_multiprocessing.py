"""Python's multiprocessing: its processes end without Python's own end."""

from __future__ import annotations

import pytest

from tests.helpers.programs import LOOP, Program, numbers


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_lose_no_events_at_their_end(torch: Program, method: str) -> None:
    torch.quietly(
        LOOP + "import multiprocessing\n"
        "def train():\n"
        "    optimizer = Optimizer()\n"
        "    for _ in range(50): optimizer.step()\n"
        "if __name__ == '__main__':\n"
        f"    context = multiprocessing.get_context({method!r})\n"
        "    workers = [context.Process(target=train) for _ in range(2)]\n"
        "    for worker in workers: worker.start()\n"
        "    for worker in workers: worker.join()\n"
    )
    assert [numbers(events, "step") for events in torch.all_events()] == [list(range(50))] * 2
