"""safetensors (tried with 0.8): checkpoints that are written of PyTorch's tensors."""

from ..wrappers import phases

PATCHES = [("safetensors.torch", phases("", save_file="checkpoint", save_model="checkpoint"))]
