"""safetensors: checkpoints that are written of PyTorch's tensors."""

from __future__ import annotations

from tests.helpers.programs import LOOP, Program, phases


def test_a_checkpoint_is_timed(torch: Program) -> None:
    torch.write({"safetensors/torch.py": "def save_file(tensors, path): return path"})
    out = torch.quietly(
        LOOP + "from safetensors.torch import save_file\n"
        "optimizer = Optimizer()\noptimizer.step()\n"
        "print(save_file({}, 'a.safetensors'))\noptimizer.step()\n"
    )
    assert out == "a.safetensors\n"
    assert phases(torch.events()).count("checkpoint") == 1
