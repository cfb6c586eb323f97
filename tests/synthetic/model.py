"""The kernels of one step, in the order of issue, with their durations in ns."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tests.synthetic import names
from tests.synthetic.machine import Log
from tests.synthetic.plan import Plan
from tests.synthetic.recording import Ints


@dataclass(frozen=True)
class Work:
    """Kernels to launch: ids of their names, and ns."""

    names: Ints
    ns: Ints

    def parts(self, count: int) -> list[Work]:
        """Split into `count` parts of about equal size."""
        cuts = [len(self.ns) * i // count for i in range(count + 1)]
        return [Work(self.names[i:j], self.ns[i:j]) for i, j in pairwise(cuts)]

    def share(self, part: float) -> Work:
        """Return at least one of the kernels, as many as make up this part of all."""
        rows = np.arange(max(1, round(part * len(self.ns)))) % len(self.ns)
        return Work(self.names[rows], self.ns[rows])


@dataclass(frozen=True)
class Model:
    """One step's kernels, the same on every rank."""

    forward: Work
    backward: Work
    optimizer: Work
    autotune: Work

    @classmethod
    def of(cls, plan: Plan, log: Log) -> Model:
        """The plan's model, its names in the log."""
        seed = plan.seed if plan.model_seed is None else plan.model_seed
        rng = np.random.default_rng((seed, 1))
        ids = {
            part: np.array([log.name(text) for text in texts])
            for part, texts in (
                ("forward", names.forward(plan.distinct_kernels)),
                ("backward", names.backward(plan.distinct_kernels)),
                ("loss", names.LOSS),
                ("optimizer", names.OPTIMIZER if plan.named_optimizer else names.UPDATE),
                ("autotune", names.AUTOTUNE),
            )
        }
        forward = _layered(plan, rng, ids["forward"], ids["loss"], plan.forward_kernels)
        backward = _layered(plan, rng, ids["backward"], ids["loss"][::-1], plan.backward_kernels)
        adam = ids["optimizer"][(np.arange(plan.optimizer_kernels) < 1).astype(int)]
        tuned = ids["autotune"][np.arange(plan.kernels_per_step // 2) % len(ids["autotune"])]
        return cls(
            forward,
            Work(backward.names[::-1], backward.ns[::-1]),
            Work(adam, np.full(len(adam), max(plan.kernel_ns // 2, 1_000))),
            Work(tuned, np.full(len(tuned), plan.kernel_ns * 2)),
        )


def _layered(plan: Plan, rng: np.random.Generator, ids: Ints, last: Ints, count: int) -> Work:
    """`count` kernels: the same block for every layer, then the `last` ones."""
    body = count - len(last)
    block = max(1, -(-body // plan.layers))
    order = np.arange(body) % block
    shape = np.exp(rng.normal(0, 0.8, block))[order]
    shape = np.concatenate((shape, np.full(len(last), shape.mean())))
    ns = (shape * (plan.kernel_ns / shape.mean())).astype(np.int64)
    return Work(np.concatenate((ids[order % len(ids)], last)), np.maximum(ns, 800))
