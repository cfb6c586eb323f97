"""The GPUs' clocks, power, use and links, asked of NVML while a program is recorded.

``sampler`` asks at a steady beat, ``cards`` and ``topology`` are what it asks, ``log`` reads what
it wrote.
"""
