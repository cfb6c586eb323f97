"""Tells where kernels are so short that launching them costs as much as they do."""

from gputrace.extend import ExtraTable, Kind, format_ns

TINY_NS = 5_000


def tiny_kernels(facts):
    rows, tiny_ns, all_ns = [], 0, 0
    for operations in facts.operations:
        events = operations.events
        length = (events.end - events.start)[events.kind == Kind.KERNEL]
        tiny = length[length < TINY_NS]
        rows.append((f"gpu {operations.gpu.gpu}", len(length), len(tiny)))
        tiny_ns, all_ns = tiny_ns + int(tiny.sum()), all_ns + int(length.sum())
    if not tiny_ns:
        return
    yield ExtraTable(f"Kernels under {format_ns(TINY_NS)}", ("", "kernels", "tiny"), tuple(rows))
    yield facts.finding(
        "tiny-kernels",
        "low",
        0,
        f"{tiny_ns / all_ns:.0%} of the kernels' time is in kernels under {format_ns(TINY_NS)}",
        "fuse them, or replay them as a CUDA graph",
        {"tiny_ns": tiny_ns, "kernels_ns": all_ns},
    )
