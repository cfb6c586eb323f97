"""One line for each GPU, for logs."""

from gputrace.extend import format_ns


def render(analysis):
    lines = []
    for gpu in analysis.gpus:
        busy = 1 - gpu.idle_ns / gpu.span_ns if gpu.span_ns else 0
        lines.append(f"gpu {gpu.gpu}: busy {busy:.1%} of {format_ns(gpu.span_ns)}\n")
    return "".join(lines)
