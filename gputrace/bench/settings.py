"""The settings of a run, as studies and command lines name them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

_LARGEST: Final = (1 << 63) - 1
Count = Annotated[int, msgspec.Meta(ge=1, le=_LARGEST)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
_Rate = Annotated[float, msgspec.Meta(gt=0)]
_Share = Annotated[float, msgspec.Meta(gt=0, lt=1)]
OnOff = bool | Literal["on", "off"]
_Models = Literal[
    "resnet20", "resnet44", "resnet110", "resnet50", "inception3", "densenet121", "alexnet"
]

MADE: Final = ("png", "jpeg")
"""Values of ``data`` that stand for images that are made for the study."""

CORES: Final = "cores"
"""The value of ``workers`` that stands for as many as the machine that runs it has cores."""


LAUNCHERS: Final = {"ddp": "torchrun", "horovod": "mpi", "chainermn": "mpi"}
"""Placements with a process for each GPU, and what starts these on several machines."""


class Setting(NamedTuple):
    """An option of the workload scripts, as a study names it."""

    name: str
    kind: Any


OPTIONS: Final = (
    Setting("model", _Models),
    Setting("batch", Count),
    Setting("steps", Count),
    Setting("warmup", Natural),
    Setting("data", str),
    Setting("device", Literal["auto", "cuda", "cpu"]),
    Setting("workers", Natural | Literal["cores"]),
    Setting("layout", Literal["NCHW", "NHWC"]),
    Setting("update", str),
    Setting("staging", OnOff),
    Setting("pinned", OnOff),
    Setting("validate", Literal["none", "one", "all"]),
    Setting("epoch", Count),
    Setting("learning-rate", _Rate),
    Setting("target", _Share),
    Setting("seed", Natural),
)
"""What is handed to a script as it is; ``gpus`` is too, but a study on cards gives it itself."""

SETTINGS: Final = (Setting("framework", str), Setting("gpus", Count), *OPTIONS)

KINDS: Final = dict(SETTINGS)
