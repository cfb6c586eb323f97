"""Results of studies made by hand, so that every figure can be checked on paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gputrace.model.time_class import CLASSES
from gputrace.studies.measures import (
    FindingMeasure,
    GpuMeasure,
    LinkMeasure,
    Measure,
    Prediction,
    Results,
    RunResult,
)

MS: Final = 1_000_000
BATCH: Final = 64


def classes(**milliseconds: float) -> dict[str, int]:
    """A step by class, in nanoseconds; the classes not named take none of it."""
    return {name: round(milliseconds.get(name, 0) * MS) for name in CLASSES}


def measured(
    own: Mapping[str, int] | None = None, steps: Mapping[int, int] | None = None, **more: Any
) -> Measure:
    """Return figures with GPUs, whose classes sum to the step, or of the host alone."""
    whole = sum(own.values()) if own is not None else more.pop("step_ns", None)
    idle = own and sum(own[n] for n in ("recorder", "data_feeding", "sync", "alloc", "launch"))
    return Measure(
        source="markers",
        kind="training",
        steps=steps or {0: 20},
        steady=15,
        step_ns=whole,
        classes=own,
        gap_ns=None if own is None else (idle or 0) + own["other_idle"],
        **more,
    )


def run(rate: float, measure: Measure | None = None, **settings: Any) -> RunResult:
    """A run that is done, with its samples a second; settings as a study has them."""
    own = dict(settings)
    repeat, recorded = own.pop("repeat", 1), own.pop("recorded", True)
    told = {
        "batch": own.get("batch", BATCH),
        "gpus": own.get("gpus", 1),
        "steps": 20,
        "samples_per_second": rate,
        "samples_per_second_median": rate,
        **own.pop("told", {}),
    }
    settings = {key.replace("learning_rate", "learning-rate"): own[key] for key in own}
    return RunResult(
        {"framework": "torch", **settings}, repeat, recorded, result=told, measure=measure
    )


def study(*runs: RunResult, title: str = "A study", question: str = "What is it?") -> Results:
    return Results(title, question, tuple(runs))


def scaling() -> Results:
    """One, two and four GPUs: 100 ms a step, then 110 and 125; losses of known classes."""
    steps = {
        1: classes(compute=80, h2d=10, launch=10),
        2: classes(compute=80, h2d=10, launch=8, communication=12),
        4: classes(compute=80, h2d=15, launch=5, communication=25),
    }
    rates = {1: 640.0, 2: 2 * 64 / 0.110, 4: 4 * 64 / 0.125}
    runs = [
        run(
            rates[gpus] * (1 + 0.01 * (repeat - 2)),
            measured(own, dict.fromkeys(range(gpus), 20)),
            gpus=gpus,
            batch=BATCH,
            learning_rate=0.1,
            repeat=repeat,
        )
        for repeat in (1, 2, 3)
        for gpus, own in steps.items()
    ]
    return study(*runs, title="Scaling", question="How far do more GPUs help?")


def pairs(links: Sequence[str] = ("NV18", "PIX", "SYS")) -> Results:
    """Three pairs of GPUs over three sorts of links."""
    runs = []
    for place, link in enumerate(links):
        slow = place * 10
        own = classes(compute=80, communication=10 + slow)
        among = LinkMeasure(0, place + 1, link, 200_000_000_000 // (place + 1))
        rate = 2 * BATCH / (sum(own.values()) / 1e9)
        runs.append(run(rate, measured(own, links=(among,)), gpus=2, visible=[0, place + 1]))
    return study(*runs, title="Pairs", question="Which pair is slower?")


def cards() -> Results:
    """Three cards, the last clocked a tenth lower and as much slower."""
    runs = []
    for card, clock in enumerate((1980.0, 1980.0, 1782.0)):
        own = classes(compute=80 * 1980 / clock)
        gpu = GpuMeasure(card, 0, "NVIDIA H200", own["compute"], None, clock, 1980)
        runs.append(
            run(BATCH / 0.08 * clock / 1980, measured(own, gpus=(gpu,)), gpus=1, visible=[card])
        )
    return study(*runs, title="Cards", question="Is one slower?")


def staging() -> Results:
    """A step of 100 ms with a copy in the open; foretold 82 ms without, and 80 ms came."""
    foretold = Prediction("prefetch", 100 * MS, 82 * MS, 80 * MS, 90 * MS)
    before = classes(compute=75, h2d=5, data_feeding=20)
    after = classes(compute=75, h2d=1, data_feeding=4)
    verdict = FindingMeasure("data-feeding", "high", 20 * MS, "the GPU waits for data")
    return study(
        run(640, measured(before, predictions=(foretold,), findings=(verdict,)), staging="off"),
        run(800, measured(after), staging="on"),
        title="Staging",
        question="What does double buffering gain?",
    )


def placements() -> Results:
    """DataParallel, whose first GPU computes twice what the others do, beside DDP."""

    def gpus(first: int, others: int, memory: int) -> tuple[GpuMeasure, ...]:
        each = [first, *[others] * 3]
        return tuple(
            GpuMeasure(place, 0, "NVIDIA H200", ns * MS, memory // (place + 1), None, None)
            for place, ns in enumerate(each)
        )

    ddp = Prediction("ddp", 160 * MS, 95 * MS, 90 * MS, 110 * MS)
    single = classes(compute=80)
    parallel = classes(compute=100, communication=20, launch=40)
    apart = classes(compute=80, communication=20)
    return study(
        run(800, measured(single), gpus=1, update="single"),
        run(
            1600,
            measured(parallel, gpus=gpus(120, 60, 4 << 30), predictions=(ddp,)),
            gpus=4,
            update="dataparallel",
        ),
        run(2560, measured(apart, gpus=gpus(80, 80, 2 << 30)), gpus=4, update="ddp"),
        title="Placements",
        question="What does GPU 0 do?",
    )


def loader() -> Results:
    """PNG and JPEG with none, two and six workers."""
    waits = {("png", 0): 40, ("png", 2): 12, ("png", 6): 2, ("jpeg", 0): 20, ("jpeg", 2): 5}
    runs = []
    for (data, workers), wait in (waits | {("jpeg", 6): 1}).items():
        own = classes(compute=80, data_feeding=wait)
        rate = BATCH / (sum(own.values()) / 1e9)
        told = {"data_wait_s": 20 * wait / 1e3, "data_waits": 20}
        measure = measured(own, data_waits_ns=20 * wait * MS, data_waits=20)
        runs.append(run(rate, measure, data=data, workers=workers, told=told))
    return study(*runs, title="Loader", question="How many workers feed a GPU?")


def host() -> Results:
    """Recordings of the host alone: one that holds, one that does not, one never run."""

    def one(name: str, found: int, script: float, recorded: float) -> RunResult:
        told = {"data_wait_s": script, "data_waits": 12, "steps": 12, "gpus": 1}
        waits = {"data_waits_ns": round(recorded * 1e9), "data_waits": 12}
        measure = measured(None, {0: found}, step_ns=50 * MS, **waits)
        return run(300, measure, framework=name, device="cpu", told=told)

    skipped = RunResult({"framework": "cntk", "device": "cpu"}, 1, True, "skipped", "no Python 3.6")
    return study(
        one("torch", 12, 0.500, 0.510),
        one("mxnet", 12, 0.400, 0.460),
        one("chainer", 11, 0.400, 0.400),
        skipped,
        title="On the CPU",
        question="Do recordings agree with the scripts?",
    )
