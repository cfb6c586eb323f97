"""Cures of how data are loaded: torch's DataLoader, Hugging Face's arguments for it, tf.data."""

import sys
from collections.abc import Callable
from functools import wraps
from inspect import signature
from types import FunctionType
from typing import Any

from ..frameworks.torch_data import count_ready
from ..host_file import Suppress, is_handlers, time_ns
from ..steps import weak
from ..wrappers import ours
from .trial import WHOLE, asked, between, change_call, cures, guarded, is_on, sees_gpu, trial


def loaders(module: Any) -> None:
    """Change how torch's DataLoader is made, and take its batches to the GPU ahead of time.

    By turns, loaders are made as they are, and have a twin. Those that a loader's worker makes for
    itself stay as they are: it can have no children, nor use a GPU.
    """
    iterable, by_turns = getattr(module, "IterableDataset", ()), bool(asked.get("stretch"))

    def arguments(present: "Callable[[str], Any]") -> "dict[str, tuple[str, Any]]":
        return {} if _in_worker(module) else _loader_arguments(present, iterable)

    change_call(module.DataLoader, "__init__", arguments, by_turns)
    chosen = [cure for cure in _OF_LOADER if cure in cures]
    if by_turns and chosen:
        _have_twins(module, chosen)
    if "staging" in cures:
        guarded("staging", _stage, module)
    guarded("persistent", _meet_epochs, module, iterable)


_SHORT = 64
"""Most batches of an epoch that a turn can hold whole."""


def _meet_epochs(module: Any, iterable: Any) -> None:
    """Say which workers start anew with each epoch, and by turns have them stay.

    A turn has whole epochs: what is ready before it, as ``buffered`` says, is one.
    """
    cls, by_turns = module.DataLoader, bool(asked.get("stretch")) and "persistent" in cures
    iterate = cls.__iter__

    @wraps(iterate)
    def begin_epoch(self: Any) -> Any:
        held = vars(self)
        trial.has.add("loader")
        stays = held.get("persistent_workers")
        if not held.get("num_workers") or stays or isinstance(self.dataset, iterable):
            return iterate(self)
        trial.has.add("new-workers")
        length = guarded("", len, self) or 0
        if length <= _SHORT:
            trial.buffered = max(trial.buffered, length)
        elif by_turns:
            trial.reasons["persistent"] = f"{WHOLE}an epoch has {length} batches"
        # Kept from change by the loader itself.
        held["persistent_workers"] = by_turns and is_on("persistent")
        try:
            return iterate(self)
        finally:
            held["persistent_workers"] = stays

    cls.__iter__ = ours(begin_epoch)


def _in_worker(module: Any) -> bool:
    """Return whether this process is a worker of a loader."""
    info = getattr(module, "get_worker_info", None)
    return info is not None and info() is not None


_OF_LOADER = {"workers": "num_workers", "prefetch": "prefetch_factor", "pinned": "pin_memory"}
"""Settings of loaders that a twin may have otherwise, by cure."""
_ITS_OWN = "_dataset_kind", "_IterableDataset_len_called", "_DataLoader__multiprocessing_context"
"""Attributes that a loader holds beside the arguments by which it is made."""
_alone = [""]
"""Why the loader that was asked last has no twin; empty where it needs none."""
_LONG = 20
"""Least length of an epoch for turns, in batches that the two loaders may have ready: what is ready
at its end falls on either."""


def _have_twins(module: Any, chosen: "list[str]") -> None:
    """Have a second iterator, with other settings, take batches of the same sampler by turns."""
    base = getattr(module, "_BaseDataLoaderIter", None)
    if base is None:
        for cure in chosen:
            trial.skip(cure, f"{WHOLE}this DataLoader is not torch's")
        return
    begin, following = base.__init__, base.__next__
    names = {*signature(module.DataLoader.__init__).parameters, *_ITS_OWN}

    @wraps(begin)
    def begin_kept(self: Any, loader: Any, *args: Any, **keywords: Any) -> None:
        begin(self, loader, *args, **keywords)
        # Not the loader, nor what a program keeps there: that may hold iterators, which would stay.
        held = vars(loader)
        self._gputrace_settings = {name: held[name] for name in names & set(held)}

    @wraps(following)
    def next_batch(self: Any) -> Any:
        on = all(map(is_on, chosen))
        twin, why = _twin_of(module, self, chosen, on)
        _alone[0] = why
        if twin is None:
            return following(self)
        first, second = (twin, self) if on else (self, twin)
        _working[0] = weak(first)
        try:
            batch = following(first)
        except StopIteration:
            batch = following(second)
        _taken[0] += 1
        return batch

    def tell_alone(_: int) -> None:
        # A loader of a validation, without steps, may have none.
        if _alone[0]:
            trial.reasons.update(dict.fromkeys(chosen, WHOLE + _alone[0]))

    base.__init__, base.__next__ = ours(begin_kept), ours(next_batch)
    _set_starts_aside(module, base, chosen)
    trial.count_batches = _count_batches
    between.append(tell_alone)


_working: "list[Callable[[], Any]]" = [int]
"""Weak reference to the iterator that gives the batches of this turn."""


_taken = [0]
"""Batches that both iterators have given."""


def _count_batches() -> "list[int]":
    """Return how many batches that iterator has ready, 0 without workers, and those taken."""
    ready = 0
    with Suppress(Exception):
        iterator = _working[0]()
        ready = count_ready(iterator) if hasattr(iterator, "_task_info") else 0
    return [ready, _taken[0]]


def _set_starts_aside(module: Any, base: Any, chosen: "list[str]") -> None:
    """Leave out of steps with a cure the start of the program's workers: it would have the twin's.

    What these do on other cores meanwhile is left in.
    """
    iterate = module.DataLoader.__iter__

    @wraps(iterate)
    def begin_epoch(self: Any) -> Any:
        start = time_ns()
        iterator = iterate(self)
        taken = time_ns() - start
        on = isinstance(iterator, base) and all(map(is_on, chosen))
        if on and _twin_of(module, iterator, chosen, True)[0] is not None:
            trial.aside += taken
        return iterator

    module.DataLoader.__iter__ = ours(begin_epoch)


def _twin_of(module: Any, iterator: Any, chosen: "list[str]", wanted: bool) -> "tuple[Any, str]":
    """Return the twin of a loader's iterator, made where it is wanted, and why it cannot be made;
    None without one, and an empty text where it can.
    """
    held = iterator.__dict__
    settings, sampler = held.get("_gputrace_settings"), held.get("_sampler_iter")
    if settings is None or type(sampler) is _Shared or _in_worker(module):
        return None, ""
    known, twin, why = held.get("_gputrace_twin", (None, None, ""))
    if known is not sampler:
        # Of an epoch before, or the first.
        twin, why = _twin(module, iterator, dict(settings), chosen) if wanted else (None, "")
        held["_gputrace_twin"] = sampler if wanted else None, twin, why
    return twin, why


class _Shared:
    """Sampler whose batches are taken from an iterator that others take from too."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.iterator)


def _twin(
    module: Any, iterator: Any, settings: "dict[str, Any]", chosen: "list[str]"
) -> "tuple[Any, str]":
    """Return another iterator over what a loader's sampler still has; None and why without one.

    It is of a plain DataLoader: what a program's own class does at its end is for one loader only.
    Where the program's workers stay from epoch to epoch, so do the twin's. One that would be no
    other is none: the reason was given when the loader was made.
    """
    if not any(change["cure"] in chosen for change in trial.changes):
        return None, ""
    held = iterator.__dict__
    try:
        if settings.get("_dataset_kind"):
            raise ValueError("the dataset is iterable: both would read all of it")
        length = len(iterator._index_sampler)
        settings.update((_OF_LOADER[cure], cures[cure]) for cure in chosen)
        workers, prefetch = settings["num_workers"], settings.get("prefetch_factor") or 2
        if length < _LONG * (workers * prefetch + 1):
            raise ValueError(f"an epoch has {length} batches only")
        if "_gputrace_loader" not in held:
            if workers:
                settings["prefetch_factor"] = prefetch
            else:
                settings["persistent_workers"] = False
            which = "sampler" if settings["batch_sampler"] is None else "batch_sampler"
            shared = settings[which] = _Shared(iterator._sampler_iter)
            # A seed drawn from the program's numbers would change those that come after.
            settings["generator"] = module.torch.Generator().manual_seed(iterator._base_seed)
            loader = module.DataLoader.__new__(module.DataLoader)
            vars(loader).update(settings, _iterator=None)
            held["_gputrace_loader"] = loader, shared
        loader, shared = held["_gputrace_loader"]
        shared.iterator = iterator._sampler_iter
        return iter(loader), ""
    except Exception as error:
        if is_handlers(error):
            raise
        return None, repr(error)[:200]


def _loader_arguments(
    present: "Callable[[str], Any]", iterable: Any
) -> "dict[str, tuple[str, Any]]":
    wanted: dict[str, tuple[str, Any]] = {}
    workers = before = present("num_workers")
    if "workers" in cures:
        if isinstance(present("dataset"), iterable):
            trial.skip("workers", "the dataset is iterable: each worker may read all of it")
        else:
            workers = cures["workers"]
            wanted["num_workers"] = ("workers", workers)
    factor = cures.get("prefetch") or present("prefetch_factor") or 2
    trial.buffered = max(trial.buffered, workers * factor)
    wanted.update(_of_workers(workers, before))
    if "pinned" in cures and sees_gpu("pinned"):
        wanted["pin_memory"] = ("pinned", True)
    return {
        name: ("" if cure in _by_trainer else cure, value) for name, (cure, value) in wanted.items()
    }


def _of_workers(workers: int, before: int) -> "dict[str, tuple[str, Any]]":
    """Return arguments that only a loader with workers takes, or what takes them away."""
    wanted: dict[str, tuple[str, Any]] = {}
    for cure, name in (("prefetch", "prefetch_factor"), ("persistent", "persistent_workers")):
        if workers and cure in cures:
            wanted[name] = (cure, cures[cure])
        elif not workers:
            trial.skip(cure, "the loader has no workers")
            if before:
                wanted[name] = ("", None if cure == "prefetch" else False)
    return wanted


_OF_TRAINER = {
    "workers": "dataloader_num_workers",
    "prefetch": "dataloader_prefetch_factor",
    "persistent": "dataloader_persistent_workers",
    "pinned": "dataloader_pin_memory",
    "bucket-cap": "ddp_bucket_cap_mb",
    "static-graph": "ddp_static_graph",
}
"""Arguments by which Hugging Face's Trainer makes loaders and DistributedDataParallel, by cure:
they are in the program, where the calls that they lead to are not."""


_by_trainer: "set[str]" = set()
"""Cures whose change is one of these arguments."""


def trainer_arguments(module: Any) -> None:
    """Change the arguments of Hugging Face's Trainer, of whichever class they are."""
    cls = module.TrainingArguments
    begin = vars(cls).get("__post_init__")
    wanted = {cure: name for cure, name in _OF_TRAINER.items() if cure in cures}
    if not wanted or not isinstance(begin, FunctionType):
        return

    @wraps(begin)
    def begin_changed(self: Any) -> None:
        for cure, name in wanted.items():
            old, new = getattr(self, name, None), cures[cure]
            needs_workers = cure in ("prefetch", "persistent")
            if old == new or (needs_workers and not self.dataloader_num_workers):
                continue
            if hasattr(self, name) and (cure != "pinned" or sees_gpu(cure)):
                if not asked.get("stretch"):
                    setattr(self, name, new)
                _by_trainer.add(cure)
                call = type(self).__name__
                trial.change(cure, call, name, -1, old, new, ("transformers",))
        begin(self)

    cls.__post_init__ = ours(begin_changed)


def _stage(module: Any) -> None:
    """Copy each next batch to the GPU on a stream of its own while the program trains."""
    if not sees_gpu("staging"):
        return
    base, torch = module._BaseDataLoaderIter, sys.modules["torch"]
    following = base.__next__

    @wraps(following)
    def next_batch(self: Any) -> Any:
        held = self.__dict__
        if "_gputrace_ahead" not in held:
            if not is_on("staging") or _in_worker(module):
                return following(self)
            stream = held.setdefault("_gputrace_stream", torch.cuda.Stream())
            held["_gputrace_ahead"] = _ahead(torch, stream, following, self)
            trial.change("staging", "next", "", -1, "", "")
        stream, (batch, error) = held["_gputrace_stream"], held.pop("_gputrace_ahead")
        if error is not None:
            raise error
        current = torch.cuda.current_stream()
        current.wait_stream(stream)
        each_tensor(torch, batch, lambda tensor: tensor.record_stream(current))
        if is_on("staging"):
            held["_gputrace_ahead"] = _ahead(torch, stream, following, self)
        return batch

    base.__next__ = ours(next_batch)


def _ahead(torch: Any, stream: Any, following: Any, loader: Any) -> "tuple[Any, Any]":
    try:
        batch = following(loader)
    except StopIteration as error:
        return None, error
    with torch.cuda.stream(stream):
        return each_tensor(torch, batch, lambda tensor: tensor.cuda(non_blocking=True)), None


def each_tensor(torch: Any, value: Any, function: "Callable[[Any], Any]") -> Any:
    """Return a batch with the function's values in place of its tensors, where it returns any."""
    if isinstance(value, torch.Tensor):
        made = function(value)
        return value if made is None else made
    if isinstance(value, dict):
        for key in value:
            value[key] = each_tensor(torch, value[key], function)
        return value
    if isinstance(value, (list, tuple)):
        items = [each_tensor(torch, item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def tf_datasets(module: Any) -> None:
    """Have TensorFlow choose how many calls of a map run at once, and how far to read ahead."""
    cls, autotune = module.DatasetV2, -1
    if "tf-parallel" in cures:
        for name in ("map", "interleave", "batch"):
            parallel = {"num_parallel_calls": ("tf-parallel", autotune)}
            change_call(cls, name, lambda _, parallel=parallel: parallel)
    iterate = vars(cls).get("__iter__")
    if "tf-prefetch" in cures and iterate is not None:

        @wraps(iterate)
        def ahead(self: Any) -> Any:
            if type(self).__name__ == "_PrefetchDataset":
                trial.skip("tf-prefetch", "the dataset ends with a prefetch already")
                return iterate(self)
            trial.change("tf-prefetch", "prefetch", "buffer_size", -1, None, autotune)
            return iterate(self.prefetch(autotune))

        cls.__iter__ = ours(ahead)
