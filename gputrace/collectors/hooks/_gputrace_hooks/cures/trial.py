"""Trial of this process: its steps and losses, and the changes made in it, by turns.

Cures change arguments of calls by `change_call`, and are switched off and on between steps.
"""

import atexit
import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

from .. import recorder, steps
from ..host_file import Suppress, is_handlers, time_ns
from ..wrappers import ours

asked: "dict[str, Any]" = {}
"""GPUTRACE_TRY, as `gputrace try` set it."""
cures: "dict[str, Any]" = {}
"""Values of cures by id."""
between: "list[Callable[[int], None]]" = []
"""Called between steps, with their number so far."""
switched: "list[tuple[str, Callable[[bool], None]]]" = []
"""Cures, and what is called where they are switched off or on within the run."""
_on: "set[str]" = set()
"""Ids of the cures that are on."""

_FRAMEWORKS = (
    *("torch", "lightning", "transformers", "tensorflow", "keras", "jax", "flax"),
    *("mxnet", "chainer", "cntk"),
)
WHOLE = "not by turns: "
"""Beginning of the reason of a cure for which a run is to be made as a whole."""
FEWEST_STEPS = 5
"""Steps to measure at least."""
MOST_CALLS = 20
"""Changes of a cure that are kept."""
_WORLD = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_MOST_EXITS = 2
_FOLDER = os.path.dirname(os.path.abspath(recorder.__file__))
_SIGTERM = 15


class Trial:
    """Steps of this process, and the changes made in it."""

    def __init__(self) -> None:
        self.changes: list[dict[str, Any]] = []
        self.reasons: dict[str, str] = {}
        # What the program has that cures need: words of `Cure.needs`.
        self.has: set[str] = set()
        self.buffered = 0
        self.count_batches: Callable[[], list[int]] = list
        # Backward passes, which end the steps of a program that lacks an optimizer.
        self.passes, self.lacks_optimizer = 0, False
        self.restart()

    def restart(self) -> None:
        """Begin anew in a forked child, with the changes that were made before."""
        self.pid = os.getpid()
        # Aside are nanoseconds of what the program would not do with the cures that are on.
        self.rank = self.stops = self.aside = 0
        self.ends: list[int] = []
        self.losses: list[Any] = []
        self.loss: Any = None
        self.batches: list[list[int]] = []
        self.rounds: list[list[int]] = []
        self.to_come: list[int] = []

    def write(self, kind: str = "try") -> None:
        """Leave who the process is, ``ends`` (of steps, nanoseconds), ``losses``, the turns of each
        of its ``rounds``, the loader's ``batches``, ready and taken so far, where the measuring of
        a turn begins and ends, whether it was ``stopped``, the ``changes``, ``reasons`` for which
        cures change nothing where they do not, what the program ``has`` that cures need, how many
        batches loaders may have had ready before the first step (``buffered``), and torch's
        ``threads``.
        """
        host, cuda = os.uname().nodename, _initialized_cuda()
        path = os.path.join(asked["folder"], f"{host}.{self.pid}.{kind}")
        content = {
            "pid": self.pid,
            "host": host,
            "rank": read_number("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
            "world_size": read_number(*_WORLD),
            "ends": self.ends,
            "losses": [_value(loss) for loss in self.losses if kind == "try"],
            "rounds": self.rounds,
            "batches": self.batches,
            "stopped": bool(self.stops),
            "changes": self.changes,
            "reasons": self.reasons,
            "has": sorted(self.has),
            "main": os.path.abspath(sys.argv[0]) if sys.argv and sys.argv[0] else "",
            "versions": {
                name: str(sys.modules[name].__version__)
                for name in _FRAMEWORKS
                if getattr(sys.modules.get(name), "__version__", None)
            },
            "gpu": "" if cuda is None else str(cuda.get_device_name()),
            "buffered": self.buffered,
            "threads": getattr(sys.modules.get("torch"), "get_num_threads", int)(),
        }
        with open(path + ".new", "w") as file:
            json.dump(content, file)
        os.rename(path + ".new", path)

    def change(
        self,
        cure: str,
        call: str,
        name: str,
        place: int,
        old: Any,
        new: Any,
        beyond: "tuple[str, ...]" = (),
    ) -> None:
        """Keep what was changed in a call, and the line that made it.

        ``place`` is the argument's, -1 where it was given by name or not at all; lines of the
        packages ``beyond`` which the call comes from are passed over.
        """
        frame = outer = _program_frame(sys._getframe(1), beyond)
        cls = ""
        while outer is not None and _constructed(outer, call):
            # The program's own class: its call may say what it hands on to the base.
            cls = _constructed(outer, call)
            outer = _program_frame(outer.f_back, beyond)
        entry = {
            "cure": cure,
            "call": call,
            "argument": name,
            "position": place,
            "old": repr(old)[:80],
            "new": repr(new)[:80],
            "file": file_of(frame),
            "line": frame.f_lineno if frame is not None else 0,
            "outer": [cls, file_of(outer), outer.f_lineno] if cls and outer is not None else None,
        }
        if entry not in self.changes and len(self.changes) < MOST_CALLS * len(cures):
            self.changes.append(entry)

    def skip(self, cure: str, why: str) -> None:
        """Keep why a cure changes nothing, if it does; the first reason counts."""
        self.reasons.setdefault(cure, why)

    def finish(self) -> None:
        """Leave what there is at the end of the process, unless that was done before."""
        if self.pid == os.getpid() and not self.stops and (self.ends or asked["steps"] is None):
            self.write()

    def step_ended(self, rank: int, end: int) -> None:
        """Count a step, then switch the cures for the next one, or stop."""
        if rank > self.rank:
            # A source that knows better: what counted before were parts of its steps.
            self.rank, self.ends, self.losses, self.batches = rank, [], [], []
            self.rounds, self.to_come = [], []
        self.ends.append(end - self.aside)
        self.losses.append(self.loss)
        self.loss = None
        count = len(self.ends)
        past, stretch = count - asked["warmup"], asked.get("stretch", 0)
        in_vain = stretch and past <= 0 and any(r.startswith(WHOLE) for r in self.reasons.values())
        late = count > FEWEST_STEPS and end > asked.get("until", end)
        # Other ranks would wait in vain for a process that ends early.
        late = late and (read_number(*_WORLD) or 1) <= 1
        enough = asked["steps"] is not None and past >= asked["steps"]
        if self.stops or in_vain or late or enough:
            self._stop()
        for call in between:
            call(count)
        # The first steps of a stretch are passed over.
        if past == 0 or (stretch and past > 0 and past % stretch in (0, asked["passed"])):
            self._wait()
            if past > 0:
                self.batches.append(self.count_batches())
        if stretch and past < 0:
            # Turns share the warm-up, in which each does what it does but once.
            turns = asked["turns"]
            _switch_to(set(turns[count * len(turns) // asked["warmup"]]))
        elif stretch and past % stretch == 0:
            self._next_turn()

    def _next_turn(self) -> None:
        """Switch to the turn that follows; between rounds, leave what there is, and heed an end."""
        if not self.to_come:
            going = self._ended_round() if self.rounds else None
            order = asked["orders"][len(self.rounds) % len(asked["orders"])]
            self.to_come = [turn for turn in order if not turn or going is None or turn in going]
            self.rounds.append(list(self.to_come))
        _switch_to(set(([], *asked["turns"])[self.to_come.pop(0)]))

    def _ended_round(self) -> "list[int] | None":
        """Return the turns that go on, from 1; None for all. Without any, the process ends."""
        self.write("turns")
        with Suppress(OSError, ValueError):
            with open(os.path.join(asked["folder"], "going")) as file:
                going: list[int] = json.load(file)
            if not going:
                self._stop()
            return going
        return None

    def _stop(self) -> None:
        """End the process as ``sys.exit()`` would, or by SIGTERM where that is caught or no use."""
        self.stops += 1
        if self.stops == 1:
            self._wait()
            self.write()
        import threading

        if self.stops <= _MOST_EXITS and threading.current_thread() is threading.main_thread():
            raise SystemExit(0)
        os.kill(os.getpid(), _SIGTERM)

    def _wait(self) -> None:
        """Have the last step end where torch's GPU has done what was launched in it."""
        cuda = _initialized_cuda()
        if cuda is not None:
            cuda.synchronize()
        self.ends[-1] = time_ns() - self.aside


trial = Trial()


def start(asked_for: "dict[str, Any]") -> None:
    """Measure the steps of this process, and leave them at its end."""
    asked.update(asked_for)
    cures.update(asked["cures"])
    _on.update(asked["turns"][0] if asked.get("stretch") else cures)
    steps.on_step.append(trial.step_ended)
    # One that is ended later may not get to leave a file.
    between.append(lambda count: trial.write("begun") if count == 1 else None)
    recorder.on_fork.append(trial.restart)
    recorder.on_worker.append(_in_worker)
    atexit.register(trial.finish)
    leave = os._exit

    @wraps(leave)
    def finish_and_leave(status: int) -> Any:
        try:
            trial.finish()
        finally:
            leave(status)

    os._exit = finish_and_leave


def _in_worker() -> None:
    util: Any = sys.modules["multiprocessing.util"]
    util.Finalize(None, trial.finish, exitpriority=-100)


def is_on(cure: str) -> bool:
    """Return whether a cure is switched on."""
    return cure in _on


def _switch_to(wanted: "set[str]") -> None:
    changed = wanted ^ _on
    _on.symmetric_difference_update(changed)
    for cure, call in switched:
        if cure in changed:
            guarded(cure, call, cure in wanted)


def read_number(*names: str) -> "int | None":
    """Return the number that the first of these variables holds, of ``4(x2)``, as Slurm says it of
    machines with as many tasks, the first.
    """
    for name in names:
        text = os.environ.get(name, "").partition("(")[0]
        if text.isdigit():
            return int(text)
    return None


def _value(loss: Any) -> "float | None":
    with Suppress(Exception):
        return None if loss is None else float(loss)
    return None


def _initialized_cuda() -> Any:
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if getattr(cuda, "is_initialized", bool)() else None


def sees_gpu(cure: str) -> bool:
    """Return whether torch sees a GPU; without one, this cure changes nothing."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_available():
        return True
    trial.skip(cure, "torch sees no GPU")
    return False


def guarded(cure: str, function: "Callable[..., Any]", *arguments: Any) -> Any:
    """Call a function; an error of it, or of what it calls, is the cure's if one is named, and goes
    no further.

    What a signal handler of the program raises meanwhile does.
    """
    try:
        return function(*arguments)
    except Exception as error:
        if is_handlers(error):
            raise
        if cure:
            trial.skip(cure, f"failed: {_first_of(error)}"[:200])
        return None


def _first_of(error: BaseException) -> str:
    """Return the error from which others followed: what ends a capture is told as the context of
    the error that says that it has ended. A frame that keeps one would keep the program's objects.
    """
    while error.__context__ is not None:
        error = error.__context__
    return repr(error)


def _program_frame(frame: Any, beyond: "tuple[str, ...]") -> Any:
    """Return the innermost frame, from this one, that is neither ours nor a framework's."""
    homes = [_FOLDER]
    for name in ("torch", "tensorflow", "keras", *beyond):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file:
            homes.append(os.path.dirname(os.path.abspath(file)))
    while frame is not None:
        made = frame.f_code.co_filename == "<string>"  # the constructor of a dataclass
        if not made and not file_of(frame).startswith(tuple(home + os.sep for home in homes)):
            break
        frame = frame.f_back
    return frame


def file_of(frame: Any) -> str:
    """Return the path of the file that a frame's code is in; empty without a frame."""
    return os.path.abspath(frame.f_code.co_filename) if frame is not None else ""


def _constructed(frame: Any, base: str) -> str:
    """Return the class that a frame is the constructor of, if it is a ``base``'s by name."""
    code = frame.f_code
    if code.co_name != "__init__" or not code.co_argcount:
        return ""
    cls = type(frame.f_locals.get(code.co_varnames[0]))
    return cls.__name__ if base in [each.__name__ for each in cls.__mro__] else ""


def change_call(
    holder: Any,
    name: str,
    choose: "Callable[..., Any]",
    later: bool = False,
) -> None:
    """Have calls of a function, or of a class's method, take other arguments.

    ``choose`` gets what gives the present value of an argument by its name; it returns for each
    argument to change the cure, which may be empty, and the new value. Of what is changed
    ``later``, by other means, only the call is kept.
    """
    function = vars(holder).get(name)
    if not isinstance(function, FunctionType):
        return
    call = holder.__name__ if name == "__init__" else name
    changed = _Arguments(function, call, int(isinstance(holder, type)), choose)

    @wraps(function)
    def changed_call(*args: Any, **keywords: Any) -> Any:
        try:
            new = changed(list(args), dict(keywords))
            args, keywords = (args, keywords) if later else new
        except Exception:
            recorder.note_ours(f"changing {call}")
        return function(*args, **keywords)

    setattr(holder, name, ours(changed_call))


class _Arguments:
    """Arguments of a call as a cure has them."""

    def __init__(
        self,
        function: Any,
        call: str,
        first: int,
        choose: "Callable[..., Any]",
    ) -> None:
        """``first`` is the place of the first argument that a program gives, 1 after ``self``."""
        from inspect import signature

        self.parameters = signature(function).parameters
        self.names = list(self.parameters)
        self.call, self.first, self.choose = call, first, choose

    def __call__(self, args: "list[Any]", keywords: "dict[str, Any]") -> Any:
        given = list(args), dict(keywords)
        for name, (cure, value) in self.choose(lambda name: self.present(name, *given)).items():
            if name not in self.parameters:
                trial.skip(cure, f"{self.call} takes no {name} here")
                continue
            old, place = self.present(name, *given), self.names.index(name)
            if type(old) is type(value) and old == value:
                trial.skip(cure, f"{name} is {value!r} already")
                continue
            if place < len(args):
                args[place] = value
            else:
                keywords[name], place = value, self.first - 1
            if cure:
                trial.change(cure, self.call, name, place - self.first, old, value)
        return tuple(args), keywords

    def present(self, name: str, args: "list[Any]", keywords: "dict[str, Any]") -> Any:
        """Return the value of an argument before any change; None of one that is unknown here."""
        if name not in self.parameters:
            return None
        place = self.names.index(name)
        default = self.parameters[name].default
        return args[place] if place < len(args) else keywords.get(name, default)


def losses(module: Any) -> None:
    """Keep what the program differentiates, a number a step: it is read when all is over.

    Where nothing else tells of steps, as in a program that updates its parameters by itself, one
    ends with each backward pass.
    """
    function = vars(module).get("backward")
    if not isinstance(function, FunctionType):
        return

    @wraps(function)
    def backward(tensors: Any, *args: Any, **keywords: Any) -> Any:
        if hasattr(tensors, "detach") and tensors.numel() == 1:
            trial.loss = None
            with Suppress(Exception):
                trial.loss = tensors.detach().clone()
        result = function(tensors, *args, **keywords)
        trial.passes += 1
        if trial.passes == _TOLD:
            trial.lacks_optimizer = not _has_optimizer()
        if trial.lacks_optimizer and not trial.rank:
            trial.step_ended(0, time_ns())
        return result

    module.backward = ours(backward)


_TOLD = 3
"""Backward pass by which a program has its optimizer, and a framework's first step has ended."""


def _has_optimizer() -> bool:
    import gc

    base = getattr(sys.modules.get("torch.optim"), "Optimizer", ())
    return any(issubclass(type(each), base) for each in gc.get_objects())


def event_files(module: Any) -> None:
    """Have TensorBoard's files written into the folder of the trial, which is removed."""
    if not asked.get("keep"):
        change_call(module.EventFileWriter, "__init__", _elsewhere)


def tf_summaries(module: Any) -> None:
    """Do so with the files that TensorFlow writes."""
    if not asked.get("keep"):
        change_call(module, "create_file_writer_v2", _elsewhere)


def _elsewhere(present: "Callable[[str], Any]") -> "dict[str, tuple[str, Any]]":
    return {"logdir": ("", os.path.join(asked["folder"], "tensorboard"))}
