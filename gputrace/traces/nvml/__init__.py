"""What NVML says of the GPUs during a run: cards, samples and links.

`model` holds it, `tables` reads it from a trace file, `smi` from a log of nvidia-smi, and `joined`
lays such a log over a trace.
"""
