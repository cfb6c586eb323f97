"""Cures that change how a program loads its data, within the program."""

from __future__ import annotations

import importlib
import itertools
import json
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Final

import pytest

import gputrace
from gputrace.trials import runs
from gputrace.trials.cures import combine, read_candidates
from gputrace.trials.patch import make_patch
from tests.helpers.programs import torch_python
from tests.helpers.tried_programs import PROGRAM, InProgram, Real


def test_arguments_of_a_trainer_are_changed_where_the_program_gives_them(real: Real) -> None:
    package = real.folder / "modules" / "transformers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "training_args.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class TrainingArguments:\n"
        "    dataloader_num_workers: int = 0\n"
        "    dataloader_prefetch_factor: int | None = None\n"
        "    def __post_init__(self): self.ready = True\n"
    )
    program = PROGRAM.replace("optimizer = ", "arguments = TrainingArguments()\noptimizer = ", 1)
    program = program.replace("num_workers=1", "num_workers=arguments.dataloader_num_workers")
    imported = "from transformers.training_args import TrainingArguments\n"
    run = real.run("prefetch=3,workers=2", imported + program)
    changes = {(c.cure, c.call, c.argument, c.new, c.line) for c in run.changes}
    trainer = ("TrainingArguments", "dataloader_num_workers")
    assert ("workers", *trainer, "2", 6) in changes
    assert ("prefetch", trainer[0], "dataloader_prefetch_factor", "3", 6) in changes
    assert {change.cure for change in run.changes if change.call == "DataLoader"} <= {"prefetch"}
    patch = make_patch(combine(read_candidates("workers=2")), run.changes[:1], "", ["x"])
    assert "+arguments = TrainingArguments(dataloader_num_workers=2)" in patch.diff


LOADED: Final = """
import gc, json, multiprocessing, sys, torch
from torch.utils.data import DataLoader
torch.set_num_threads(1)
class Numbers(torch.utils.data.Dataset):
    fails = False
    def __len__(self): return 160
    def __getitem__(self, at):
        if self.fails and at == 70: raise KeyError("sample 70")
        return at
weight = torch.nn.Parameter(torch.zeros(1))
optimizer, data, epochs = torch.optim.SGD([weight], 0.1), Numbers(), []
loader = DataLoader(data, 1, shuffle=True, num_workers=1, persistent_workers=STAY)
for epoch in range(4):
    seen = []
    data.fails = epoch == 3
    try:
        for batch in loader:
            optimizer.zero_grad(); weight.sum().backward(); optimizer.step()
            seen.append(int(batch))
            if epoch == 1 and len(seen) == 90: break
    except KeyError as error:
        seen.append(str(error))
    epochs.append(seen)
del loader
gc.collect()  # Torch's errors hold themselves.
left = len(multiprocessing.active_children())
with open(sys.argv[1], "w") as file: json.dump([epochs, left], file)
"""


@pytest.mark.parametrize("stay", [False, True])
def test_torchs_loader_gives_each_sample_once_by_turns_and_leaves_no_worker(
    real: Real, monkeypatch: pytest.MonkeyPatch, stay: bool
) -> None:
    """An epoch ends early, and one by an error of the data set, which persistent workers miss."""
    monkeypatch.delenv("PYTHONPATH")
    real.script.write_text(LOADED.replace("STAY", str(stay)))
    seen = real.folder / "seen.json"
    words = (torch_python(), str(real.script), str(seen))
    [cure] = read_candidates("workers=3")
    run = runs.Program(words).run(cure, 10, 900, turns=runs.Turns((cure,), 8, 2))
    epochs, workers = json.loads(seen.read_text())
    assert len(run.turns[0]) > 20
    assert (run.code, run.reasons) == (0, {})
    assert [sorted(epochs[0]), sorted(epochs[2])] == [list(range(160))] * 2
    assert len(set(epochs[1])) == 90
    assert stay or "sample 70" in epochs[3][-1]
    assert workers == 0


class Batches:
    """Stands for torch's iterator of a loader: batches have the workers that made them."""

    made: ClassVar[list[int]] = []

    def __init__(self, loader: Any) -> None:
        self.num_workers, self._base_seed = loader.num_workers, 7
        self._index_sampler = loader.batch_sampler
        self.drawn_from = loader.generator
        self.made.append(self.num_workers)
        self.reset()

    def reset(self) -> None:
        self._sampler_iter = iter(self._index_sampler)

    def __next__(self) -> tuple[int, int]:
        return self.num_workers, next(self._sampler_iter)


class Loader:
    """Stands for torch's DataLoader."""

    def __init__(
        self,
        length: int,
        num_workers: int,
        prefetch_factor: int = 2,
        batch_sampler: Any = None,
        generator: Any = None,
        persistent_workers: bool = False,
    ) -> None:
        self.num_workers, self.prefetch_factor = num_workers, prefetch_factor
        self.batch_sampler = batch_sampler or range(length)
        self.generator, self.persistent_workers = generator, persistent_workers
        self._iterator: Batches | None = None

    def __iter__(self) -> Any:
        if not self.persistent_workers:
            return Batches(self)
        if self._iterator is None:
            self._iterator = Batches(self)
        else:
            self._iterator.reset()
        return self._iterator


class Generator:
    """Stands for torch's source of random numbers."""

    def manual_seed(self, seed: int) -> Generator:
        self.seed = seed
        return self


class WithEnd(Loader):
    """Ends the workers of its iterator, as InfiniteDataLoader of Ultralytics does."""

    ends = 0

    def __del__(self) -> None:
        WithEnd.ends += 1


LOADERS: Final = SimpleNamespace(
    _BaseDataLoaderIter=Batches,
    DataLoader=Loader,
    torch=SimpleNamespace(Generator=Generator),
    get_worker_info=lambda: None,
)
"""Stands for torch.utils.data.dataloader."""


@pytest.fixture
def data(hooks: InProgram, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have loaders with twins of four workers."""
    data = importlib.import_module("_gputrace_hooks.cures.data")
    for cls, name in ((Batches, "__init__"), (Batches, "__next__"), (Loader, "__iter__")):
        monkeypatch.setattr(cls, name, vars(cls)[name])
    monkeypatch.setattr(Batches, "made", [])
    hooks.state.cures.update(workers=4)
    hooks.state.asked.update(stretch=5)
    hooks.state.trial.change("workers", "DataLoader", "num_workers", -1, 1, 4)
    data._have_twins(LOADERS, ["workers"])
    return data


def test_a_loader_has_other_workers_by_turns_and_gives_each_batch_once(
    hooks: InProgram, data: Any
) -> None:
    for _epoch in range(2):
        iterator, given = Batches(Loader(200, 1)), []
        for number in range(200):
            hooks.state._on.clear()
            hooks.state._on.update(["workers"] if number % 10 >= 5 else [])
            given.append(next(iterator))
        assert given == [(4 if number % 10 >= 5 else 1, number) for number in range(200)]
        with pytest.raises(StopIteration):
            next(iterator)
    # A short validation stays as it is, but no loader whose batches are trained on.
    hooks.state._on.add("workers")
    [step_ended] = hooks.state.between
    train, short = Batches(Loader(200, 1)), Batches(Loader(50, 1))
    assert (next(short), next(train)) == ((1, 0), (4, 0))
    step_ended(1)
    assert "workers" not in hooks.state.trial.reasons
    assert next(short) == (1, 1)
    step_ended(2)
    assert hooks.state.trial.reasons["workers"].startswith(runs.WHOLE)


@pytest.mark.parametrize(("stay", "made"), [(False, [1, 4] * 3), (True, [1, 4])])
def test_workers_stay_from_epoch_to_epoch_in_a_twin_as_in_the_program(
    hooks: InProgram, data: Any, stay: bool, made: list[int]
) -> None:
    loader = Loader(200, 1, persistent_workers=stay)
    for epoch in range(3):
        iterator = iter(loader)
        for number in range(190 if epoch == 1 else 200):
            hooks.state._on.clear()
            hooks.state._on.update(["workers"] if (number + 5 * epoch) % 10 >= 5 else [])
            assert next(iterator) == (4 if hooks.state._on else 1, number)
    assert Batches.made == made


def test_the_programs_workers_start_at_no_cost_of_the_cure(
    hooks: InProgram, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call takes a second: with the cure, the program's loader would not start those it has."""
    monkeypatch.setattr(data, "time_ns", partial(next, itertools.count(0, 10**9)))
    for on, length, aside in (([], 200, 0), (["workers"], 50, 0), (["workers"], 200, 1)):
        hooks.state._on.clear()
        hooks.state._on.update(on)
        iter(Loader(length, 1))
        assert hooks.state.trial.aside == aside * 10**9
    hooks.state.asked.update(warmup=9, steps=None, turns=[[]])
    hooks.state.trial.step_ended(0, 3 * 10**9)
    assert hooks.state.trial.ends == [2 * 10**9]


def test_a_loader_within_a_worker_of_a_loader_stays_as_it_is(
    hooks: InProgram, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOADERS, "get_worker_info", lambda: "worker 0")
    hooks.state._on.add("workers")
    iterator = iter(Loader(200, 1))
    assert [next(iterator) for _ in range(3)] == [(1, number) for number in range(3)]
    assert (Batches.made, hooks.state.trial.reasons) == ([1], {})
    # So it does in a run with the cure from end to end.
    hooks.state.asked.update(stretch=0)
    monkeypatch.setattr(Loader, "__init__", vars(Loader)["__init__"])
    data.loaders(LOADERS)
    assert Loader(200, 0).num_workers == 0
    monkeypatch.setattr(LOADERS, "get_worker_info", lambda: None)
    assert Loader(200, 0, generator=None).num_workers == 4


def too_late(*_: object) -> None:
    raise TimeoutError


class Interrupted(list[int]):
    """Batches and a loss during whose reading a signal comes."""

    def __len__(self) -> int:
        signal.raise_signal(signal.SIGALRM)
        return super().__len__()

    def numel(self) -> int:
        return 1

    def detach(self) -> object:
        return len(self)

    __float__ = __index__ = detach


@pytest.mark.parametrize("within", ["guarded", "arguments", "twin", "loss", "number"])
def test_what_a_handler_raises_within_a_cure_reaches_the_program(
    hooks: InProgram, data: Any, within: str
) -> None:
    """TimeoutError is an OSError, which a cure may raise too: that is its own."""
    hooks.state._on.add("workers")
    interrupted, backward = Interrupted(range(200)), SimpleNamespace(backward=lambda _: None)
    hooks.state.losses(backward)
    loader = Loader(1, 1)
    loader.batch_sampler = interrupted
    calls: dict[str, Callable[[], object]] = {
        "guarded": lambda: hooks.state.guarded("gc", len, interrupted),
        "arguments": lambda: changed(Loader)(1, 1),
        "twin": lambda: next(Batches(loader)),
        "loss": lambda: backward.backward(interrupted),
        "number": lambda: hooks.state._value(interrupted),
    }

    def changed(cls: Any) -> Any:
        made = type("Changed", (), {"__init__": cls.__init__})
        hooks.state.change_call(made, "__init__", lambda _: {"length": ("", len(interrupted))})
        return made

    before = signal.signal(signal.SIGALRM, too_late)
    try:
        with pytest.raises(TimeoutError):
            calls[within]()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert hooks.state.guarded("gc", too_late) is None


def test_a_twin_leaves_the_loader_its_end_and_the_program_its_numbers(
    hooks: InProgram, data: Any
) -> None:
    """A loader may hold its iterator: neither that nor the one after it keeps either of them."""
    hooks.state._on.add("workers")
    for length, made_by in ((50, 1), (200, 4)):
        loader = WithEnd(length, 1)
        iterator: Any = Batches(loader)
        assert next(iterator) == (made_by, 0)
        assert WithEnd.ends == 0
        loader.iterator = iterator  # type: ignore[attr-defined]
        is_left = weakref.ref(iterator)
        # Torch draws the seed of the workers from this when an iterator is made.
        twin = iterator._gputrace_twin[1]
        assert twin is None or twin.drawn_from.seed == iterator._base_seed
        later = Batches(loader)
        del loader, iterator, twin
        assert (WithEnd.ends, is_left()) == (1, None)
        assert next(later) == (made_by, 0)
        WithEnd.ends = 0


def test_what_cannot_be_switched_within_a_run_has_whole_ones(real: Real) -> None:
    """The loader that stands for torch's has no iterator to switch."""
    real.script.write_text(PROGRAM)
    outcome = gputrace.try_cures([sys.executable, str(real.script)], "workers=4", budget="2min")
    assert [(row.verdict, row.rounds >= 3) for row in outcome.rows] == [("faster", True)]


def test_workers_stay_from_epoch_to_epoch_in_the_turns_of_the_cure(hooks: InProgram) -> None:
    class DataLoader:
        def __init__(self, length: int, num_workers: int = 2, stays: bool = False) -> None:
            self.dataset, self.num_workers = range(length), num_workers
            self.persistent_workers = stays

        def __len__(self) -> int:
            return len(self.dataset)

        def __iter__(self) -> Iterator[int]:
            stayed.append(self.persistent_workers)
            return iter(self.dataset)

    stayed: list[bool] = []
    trial, loader = hooks.state.trial, DataLoader(16)
    hooks.state.asked["stretch"] = 8
    hooks.start("persistent")
    data = importlib.import_module("_gputrace_hooks.cures.data")
    data._meet_epochs(SimpleNamespace(DataLoader=DataLoader), ())
    for turn in ({"persistent"}, set(), {"persistent"}):
        hooks.state._switch_to(turn)
        assert list(loader) == list(range(16))
    assert stayed == [True, False, True]
    assert not loader.persistent_workers, "the program may ask"
    # A turn has whole epochs.
    assert (trial.buffered, trial.reasons) == (16, {})
    assert trial.has == {"loader", "new-workers"}
    for alone in (DataLoader(16, num_workers=0), DataLoader(16, stays=True)):
        list(alone)
    assert stayed[3:] == [False, True]
    list(DataLoader(65))
    assert trial.reasons == {"persistent": "not by turns: an epoch has 65 batches"}
