"""torch's DataLoader and torchdata's: what their workers record of each batch."""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest

from gputrace.collectors.spool.host_events import HostEvents
from tests.helpers.handmade import MS
from tests.helpers.programs import Program, check_waits, event_names, torch_python


def test_waits_for_torchdatas_stateful_loader_are_recorded(program: Program) -> None:
    check_waits(program, "torchdata.stateful_dataloader.stateful_dataloader", "Iter")


LOADER: Final = {
    "torch/utils/data/_utils/fetch.py": """
class _BaseDatasetFetcher:
    def __init__(self, dataset, auto_collation, collate_fn, drop_last):
        self.dataset, self.collate_fn = dataset, collate_fn
class _MapDatasetFetcher(_BaseDatasetFetcher):
    def fetch(self, indices):
        return self.collate_fn([self.dataset[index] for index in indices])
""",
    "torch/utils/data/_utils/worker.py": """
from .fetch import _MapDatasetFetcher
def _worker_loop(dataset_kind, dataset, index_queue, data_queue, collate_fn, base_seed, worker_id):
    fetcher = _MapDatasetFetcher(dataset, True, collate_fn, False)
    while True:
        task = index_queue.get(timeout=5)
        if task is None:
            break
        try:
            data = fetcher.fetch(task[1])
        except Exception as error:
            data = error
        data_queue.put((task[0], data))
""",
    "torch/utils/data/dataloader.py": """
import multiprocessing, queue as queues, threading, time
from ._utils import fetch, worker
class _BaseDataLoaderIter:
    def __init__(self, loader):
        self._base_seed, self._num_workers = 7, loader.num_workers
        self._batches = list(enumerate(loader.batches))
    def __iter__(self): return self
    def __next__(self): return self._next_data()
class _SingleProcessDataLoaderIter(_BaseDataLoaderIter):
    def __init__(self, loader):
        super().__init__(loader)
        self._dataset_fetcher = fetch._MapDatasetFetcher(loader.dataset, True, list, False)
    def _next_data(self):
        if not self._batches: raise StopIteration
        return self._dataset_fetcher.fetch(self._batches.pop(0)[1])
class _MultiProcessingDataLoaderIter(_BaseDataLoaderIter):
    def __init__(self, loader):
        super().__init__(loader)
        context = multiprocessing.get_context(loader.context)
        self._worker_result_queue = self._data_queue = context.Queue()
        self._queues, self._task_info, self._received = [], {}, 0
        self._pin_memory = loader.pin_memory
        if self._pin_memory:
            self._data_queue = queues.Queue()
            threading.Thread(target=self._pin, daemon=True).start()
        for number in range(loader.num_workers):
            queue = context.Queue()
            self._queues.append(queue)
            results = self._worker_result_queue
            args = 0, loader.dataset, queue, results, list, self._base_seed, number
            context.Process(target=worker._worker_loop, args=args, daemon=True).start()
        for number, batch in self._batches:
            self._task_info[number] = (number % loader.num_workers,)
            self._queues[number % loader.num_workers].put((number, batch))
    def _pin(self):
        while True:
            received = self._worker_result_queue.get(timeout=5)
            time.sleep(0.02)
            self._data_queue.put(received)
    def _next_data(self):
        if self._received == len(self._batches):
            for queue in self._queues: queue.put(None)
            for child in multiprocessing.active_children(): child.join()
            raise StopIteration
        while len(self._task_info[self._received]) == 1:
            number, data = self._data_queue.get(timeout=5)
            self._task_info[number] += (data,)
        self._received += 1
        return self._task_info.pop(self._received - 1)[1]
class DataLoader:
    def __init__(self, dataset, batches, num_workers=0, context="fork", pin_memory=False):
        self.dataset, self.batches, self.num_workers = dataset, batches, num_workers
        self.context, self.pin_memory = context, pin_memory
    def __iter__(self):
        several = _MultiProcessingDataLoaderIter
        return (several if self.num_workers else _SingleProcessDataLoaderIter)(self)
""",
}

DATA: Final = """
import time
class Compose:
    def __init__(self, transforms): self.transforms = transforms
    def __call__(self, sample):
        for transform in self.transforms: sample = transform(sample)
        return sample
class Decode:
    def __call__(self, sample): time.sleep(0.01); return sample * 2
def shift(sample):
    if sample > 1000: raise ValueError(f"too large: {sample}")
    return sample + 1
class Data:
    def __init__(self): self.transform = Compose([Decode(), shift])
    def __getitem__(self, index): time.sleep(0.005); return self.transform(index)
"""

LOADS: Final = """
from data import Data
from torch.utils.data.dataloader import DataLoader
if __name__ == "__main__":
    data = Data()
    loader = DataLoader(data, [[0, 1], [2, 3], [4, 600], [6, 7]], num_workers={workers}, {more})
    for batch in loader: print(batch)
    print(type(data.transform.transforms) is list)
"""


@pytest.fixture
def loads(program: Program) -> Program:
    """With modules that have the names of torch's data loader and what the hooks use of them."""
    program.write(LOADER | {"data.py": DATA})
    return program


def parts(events: HostEvents) -> dict[str, list[int]]:
    """Lengths in milliseconds by name."""
    found: dict[str, list[int]] = {}
    for row in events.records["loader"]:
        name = events.names[int(row["name"])]
        found.setdefault(name, []).append((int(row["end"]) - int(row["start"])) // MS)
    return found


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_record_the_parts_of_their_batches(loads: Program, context: str) -> None:
    source = LOADS.format(workers=2, more=f"context={context!r}").replace("600", "5")
    assert loads.quietly(source) == loads.quietly(source, hooked=False)
    workers = [parts(events) for events in loads.all_events()]
    [main] = [own for own in workers if "start workers" in own]
    workers.remove(main)
    assert len(workers) == 2
    for own in workers:
        assert {name: len(lengths) for name, lengths in own.items()} == {
            **dict.fromkeys(("loader", "start worker"), 1),
            **dict.fromkeys(("fetch", "collate", "send", "processor time", "wait for work"), 2),
            **dict.fromkeys(("transform Decode", "transform shift"), 2),
        }
        assert min(own["transform Decode"]) >= 20
        both = zip(own["fetch"], own["transform Decode"], strict=True)
        assert min(fetch - decode for fetch, decode in both) >= 9
        assert min(own["transform shift"] + own["collate"] + own["send"]) < 5
    assert len(main["receive"]) == 4
    # One more to learn that there are no more.
    assert len(main["ask"]) == 5


@pytest.mark.parametrize(
    ("epoch", "loaders"),
    [
        ("list(DataLoader(data, [[0, 1], [2]]))", 1),
        ("made = DataLoader(data, [[0, 1], [2]]); kept.append(made); list(made)", 3),
        ("list(DataLoader(data, [[0, 1], [2]], num_workers=len(kept))); kept.append(0)", 3),
    ],
    ids=["made anew", "at a time", "of other workers"],
)
def test_loaders_made_anew_in_each_epoch_have_one_number(
    loads: Program, epoch: str, loaders: int
) -> None:
    loads.quietly(
        "from data import Data\nfrom torch.utils.data.dataloader import DataLoader\n"
        f"data, kept = Data(), []\nfor _ in range(3):\n    {epoch}\n"
    )
    found = set()
    for events in loads.all_events():
        names = np.array(event_names(events, "loader"))
        found |= set(events.records["loader"]["rank"][names == "prefetch factor"].tolist())
    assert len(found) == loaders


def test_the_pinning_thread_records_how_long_that_takes(loads: Program) -> None:
    source = LOADS.format(workers=2, more="pin_memory=True").replace("600", "5")
    assert loads.quietly(source) == loads.quietly(source, hooked=False)
    [main] = [own for own in map(parts, loads.all_events()) if "start workers" in own]
    # It may have asked for the first batch before it is watched.
    assert len(main["pin"]) in (2, 3, 4)
    assert min(main["pin"]) >= 20
    assert max(main["receive"]) < 20


@pytest.mark.parametrize("pins", [False, True])
def test_a_loader_that_is_done_is_freed_at_once(loads: Program, pins: bool) -> None:
    """Its queues do not wait for a garbage collection, with their pipes open."""
    source = LOADS.format(workers=2, more=f"pin_memory={pins}").replace("600", "5")
    source += (
        "    import gc\n"
        "    gc.collect(); gc.disable(); gc.set_debug(gc.DEBUG_SAVEALL)\n"
        "    list(loader)\n"
        "    gc.collect()\n"
        "    print(sorted({type(each).__name__ for each in gc.garbage}))\n"
    )
    assert loads.quietly(source) == loads.quietly(source, hooked=False)


def test_a_process_that_loads_by_itself_records_the_parts_too(loads: Program) -> None:
    source = LOADS.format(workers=0, more="").replace("600", "5")
    assert loads.quietly(source) == loads.quietly(source, hooked=False)
    own = parts(loads.events())
    assert len(own["fetch"]) == len(own["collate"]) == len(own["transform Decode"]) == 4
    assert min(own["fetch"]) >= 30


def test_parts_that_end_out_of_order_do_not_look_like_a_clock_set_back(
    loads: Program,
) -> None:
    watch = "from _gputrace_hooks import recorder\nplain, seen = recorder.write, []\n"
    watch += "recorder.write = lambda now: (seen.append(now), plain(now))\n"
    source = watch + LOADS.format(workers=0, more="").replace("600", "5")
    said = loads.quietly(source + "print(len(seen) > 3, seen == sorted(seen))")
    assert said.endswith("True True\n")


def test_exceptions_of_a_dataset_reach_the_program_unchanged(loads: Program) -> None:
    source = LOADS.format(workers=2, more="")
    out = loads.quietly(source)
    assert out == loads.quietly(source, hooked=False)
    assert "too large: 1200" in out


REAL: Final = """
import sys, torch
from data import Data
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Map(Data, Dataset):
    def __len__(self): return 24
    def __getitem__(self, index): return torch.tensor(super().__getitem__(index)), {"a": index}
class Stream(IterableDataset):
    def __init__(self): self.data = Data(); self.transform = self.data.transform
    def __iter__(self):
        return (self.data[index] for index in range(8))

def collate(samples): return samples

if __name__ == "__main__":
    for context in ("fork", "spawn"):
        options = dict(num_workers=2, multiprocessing_context=context)
        print([x.tolist() for x, _ in DataLoader(Map(), 4, **options)])
        print(list(DataLoader(Map(), 6, collate_fn=collate, **options)))
        loader = DataLoader(Map(), 4, persistent_workers=True, **options)
        print([x.tolist() for _ in range(2) for x, _ in loader])
    print([x.tolist() for x in DataLoader(Stream(), 4, num_workers=2)])
    print([x.tolist() for x, _ in DataLoader(Map(), 4)])
"""


def test_real_torch_loads_the_same_with_and_without_the_hooks(loads: Program) -> None:
    python = torch_python()
    for name in LOADER:
        (loads.modules / name).unlink()
    for folder in ("torch/utils/data/_utils", "torch/utils/data", "torch/utils", "torch"):
        (loads.modules / folder / "__init__.py").unlink()
        (loads.modules / folder).rmdir()
    ran = loads.run(REAL, python=python)
    assert ran == loads.run(REAL, python=python, hooked=False)
    assert ran.code == 0
    found = [parts(events) for events in loads.all_events()]
    workers = [own for own in found if "start worker" in own]
    assert len(workers) == 2 * 3 * 2 + 2
    assert all("transform Decode" in own for own in workers)
    assert not [note for events in loads.all_events() for note in events.records["note"]]
