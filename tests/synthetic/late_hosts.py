"""Programs with one cause of a late host each, for real processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

COMPUTE: Final = """
block = b"x" * 1_000_000
def hash_for(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        hashlib.sha256(block).digest()
"""
STEPS: Final = f"""
import hashlib, mmap, os, threading, time
import gputrace
{COMPUTE}
def steps(count, work):
    gputrace.step()
    began, computed = time.perf_counter(), time.thread_time()
    for _ in range(count):
        hash_for(0.010)
        work()
        gputrace.step()
    computed, began = time.thread_time() - computed, time.perf_counter() - began
    print("off the core", 1 - computed / began)
"""
LOADER: Final = f"""
import hashlib, os, time, torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
torch.set_num_threads(1)
{COMPUTE}
class Samples(Dataset):
    def __init__(self, transform=None): self.transform = transform
    def __len__(self): return 480
    def read(self, index): return torch.zeros(4096)
    def __getitem__(self, index):
        sample = self.read(index)
        return self.transform(sample) if self.transform else sample

class Compose:
    def __init__(self, *transforms): self.transforms = list(transforms)
    def __call__(self, sample):
        for transform in self.transforms: sample = transform(sample)
        return sample

class Decode:
    def __init__(self, seconds): self.seconds = seconds
    def __call__(self, sample):
        time.sleep(self.seconds)
        return sample

def train(samples, work=lambda: time.sleep(0.015), **how):
    how = dict(num_workers=2) | how
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for batch in DataLoader(samples, 8, **how):
        work()
        parameter.grad = torch.zeros(1)
        optimizer.step()
"""


@dataclass(frozen=True, slots=True)
class Plant:
    """A program with one cause.

    Attributes:
        name: for the table.
        finding: that has to come first.
        says: text that its message has to have, such as the line's function.
        program: what it does.
        source: what comes before that.
        options: of ``gputrace record``.
        quota: cores that it may use, by a control group; 0 for as many as there are.
        queues: whether the thread that trains is queued for a core whenever it is on none, so that
            its processor time tells for how long.
    """

    name: str
    finding: str
    says: str
    program: str
    source: str = STEPS
    options: tuple[str, ...] = ()
    quota: float = 0
    queues: bool = False


def _of_loader(name: str, says: str, program: str) -> Plant:
    return Plant(name, "data-feeding", says, program, LOADER)


PLANTS: Final = (
    Plant(
        "a burner on its core",
        "cpu-starved",
        "want 1 core",
        """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
burner = os.fork()
if not burner:
    hash_for(60)
    os._exit(0)
steps(100, lambda: hash_for(0.010))
os.kill(burner, 9); os.wait()
""",
        queues=True,
    ),
    Plant(
        "more threads than cores",
        "cpu-starved",
        "want 1 core",
        """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for _ in range(3): threading.Thread(target=hash_for, args=(6,), daemon=True).start()
steps(60, lambda: hash_for(0.010))
""",
    ),
    Plant(
        "a quota",
        "cpu-throttled",
        "its quota of 0.2 cores",
        "steps(60, lambda: hash_for(0.010))",
        quota=0.2,
        queues=True,
    ),
    Plant(
        "garbage collections",
        "garbage-collection",
        "generation 2",
        "import gc\ngc.disable()\nkept = [[i] for i in range(400_000)]\nsteps(60, gc.collect)",
    ),
    Plant(
        "a lock",
        "host-blocked",
        " take",
        """
lock = threading.Lock()
def hold():
    while True:
        with lock: time.sleep(0.02)
        time.sleep(0.001)
threading.Thread(target=hold, daemon=True).start()
def take():
    time.sleep(0.002)
    with lock: pass
steps(60, take)
""",
        options=("--python",),
    ),
    Plant(
        "a sleep",
        "host-blocked",
        " nap",
        "def nap(): time.sleep(0.02)\nsteps(60, nap)",
        options=("--python",),
    ),
    Plant(
        "a blocked pipe",
        "host-blocked",
        " say",
        """
reader, writer = os.pipe()
def drain():
    while True:
        time.sleep(0.02)
        os.read(reader, 65536)
threading.Thread(target=drain, daemon=True).start()
def say(): os.write(writer, b"x" * 60_000)
steps(60, say)
""",
        options=("--python",),
    ),
    Plant(
        "page faults",
        "page-faults",
        "page faults a step",
        """
text = b"x" * 40_000_000
def touch():
    with mmap.mmap(-1, 40_000_000) as memory: memory.write(text)
steps(60, touch)
""",
    ),
    Plant(
        "a thread that runs Python beside it",
        "gil-wait",
        " crunch",
        """
def crunch():
    while True:
        for number in range(1000): number * number
threading.Thread(target=crunch, daemon=True).start()
def python():
    end = time.thread_time() + 0.01
    while time.thread_time() < end: pass
steps(60, python)
""",
        options=("--python",),
    ),
    _of_loader(
        "a slow transform",
        "Decode is ",
        "train(Samples(Compose(Decode(0.010))))",
    ),
    _of_loader(
        "a slow disk",
        "reading samples is ",
        """
class Slow(Samples):
    def read(self, index):
        time.sleep(0.010)  # as a disk that gives so much and no more
        return torch.zeros(4096)
train(Slow(Compose(Decode(0.0005))))
""",
    ),
    _of_loader(
        "pickling",
        "pickling and sending",
        """
class Objects(Samples):
    def read(self, index): return {f"{index}-{n}": (n, str(n)) for n in range(30_000)}
train(Objects(), collate_fn=lambda samples: samples)
""",
    ),
    _of_loader(
        "one slow worker",
        "one worker of 4 (worker 1)",
        """
class Uneven(Samples):
    def read(self, index):
        time.sleep(0.020 if get_worker_info().id == 1 else 0.002)
        return torch.zeros(4096)
train(Uneven(), num_workers=4)
""",
    ),
    _of_loader(
        "too few workers",
        "workers would keep up",
        "train(Samples(Compose(Decode(0.006))), num_workers=1)",
    ),
)
