"""A small training of PyTorch that prints the same each time: eager, compiled, or by CUDA graphs.

    python torch_steps.py --mode eager|compile|graph|callables [--profiler] [--steps 24]

The last line says how many steps were run; no line has a time.
"""

import argparse
import contextlib

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=["eager", "compile", "graph", "callables"], default="eager")
parser.add_argument(
    "--profiler", action="store_true", help="under torch.profiler from step 8 to 16"
)
parser.add_argument("--steps", type=int, default=24)
options = parser.parse_args()
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 8))
model = model.to(DEVICE)
inputs, wanted = torch.randn(32, 64, device=DEVICE), torch.randn(32, 8, device=DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if options.mode == "compile":
    model = torch.compile(model)
elif options.mode == "callables":
    model = torch.cuda.make_graphed_callables(model, (inputs,))


def step():
    optimizer.zero_grad(set_to_none=options.mode != "graph")
    loss = nn.functional.mse_loss(model(inputs), wanted)
    loss.backward()
    optimizer.step()
    return loss


def captured():
    """Return the step as one CUDA graph, and the tensor of its loss."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    return graph, loss


graph, loss = captured() if options.mode == "graph" else (None, None)
profiler = contextlib.ExitStack()
for number in range(options.steps):
    if options.profiler and number == 8:
        profiler.enter_context(torch.profiler.profile())
    if options.profiler and number == 16:
        profiler.close()
    if graph is None:
        loss = step()
    else:
        graph.replay()
    if number % 8 == 7:
        print(f"step {number + 1}: loss {loss.item():.3f}")
profiler.close()
print(f"{options.steps} steps of {options.mode}")
