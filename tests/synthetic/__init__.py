"""Synthetic GPU-training traces whose truth is known.

recording = simulate(Plan(steps=30, data_wait_ns=2_000_000))
write_nsys(recording, path)
recording.truth.breakdown[0]["data_feeding"]
"""

from tests.synthetic.kineto import write_kineto
from tests.synthetic.nsys import write_nsys
from tests.synthetic.nvml import NvmlCard, write_nvml
from tests.synthetic.nvprof import write_nvprof
from tests.synthetic.plan import Plan
from tests.synthetic.plants import PLANTS, Plant, planted
from tests.synthetic.recording import Kind, Partition, Recording, Truth, Window
from tests.synthetic.rocpd import write_rocpd
from tests.synthetic.simulate import simulate
from tests.synthetic.variants import mixed_plan, random_plan

__all__ = [
    "PLANTS",
    "Kind",
    "NvmlCard",
    "Partition",
    "Plan",
    "Plant",
    "Recording",
    "Truth",
    "Window",
    "mixed_plan",
    "planted",
    "random_plan",
    "simulate",
    "write_kineto",
    "write_nsys",
    "write_nvml",
    "write_nvprof",
    "write_rocpd",
]
