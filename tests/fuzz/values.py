"""Values that programs trip over."""

from __future__ import annotations

from random import Random
from typing import Final

EDGES: Final = (0, 7, 8, 15, 16, 24, 31, 32, 47, 48, 53, 56, 62, 63, 64)
"""Powers of two at which types and their conversions end."""
TEXTS: Final = (
    "", " ", "0", "-1", "7", "stream 7", "1e999", "nan", "inf", "0x10", "9" * 25, "\0", "a\0b",
    "\x1b[31mred\x1b]0;title\x07", "\x9b31m", "line\nbreak\r\n\ttab", "\u202eright to left",
    "é" * 40, "😀",
    "\ud800", "%s%n{0}{x}", "../../../etc/passwd", "<script>alert(1)</script>", "[bold]",
    "'; DROP TABLE StringIds; --", '"', "ncclDevKernel_AllReduce", "ProfilerStep#3", "Memcpy HtoD",
    "cudaLaunchKernel", "data_wait", "step 4", "9999/12/31 23:59:59.999", "k" * 5000,
    "9" * 5000, "_Z" + "9" * 5000, "_Z1fN3abcE5short", "stream " + "1" * 5000, "0x" + "f" * 300,
    "triton_poi_fused_addcmul" * 680, "void cutlass::Kernel<" + "cutlass_" * 2000,
)  # fmt: skip
FLOATS: Final = (0.0, -0.0, 0.5, -1.5, 1e18, 9.3e18, -1e300, 1e308, float("inf"), float("-inf"))


def integer(rng: Random, bits: int = 64) -> int:
    """Small, around an edge of a type, or anything."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randrange(-3, 40)
    if kind == 1:
        return rng.getrandbits(bits) - (rng.getrandbits(1) << (bits - 1))
    edge: int = (1 << rng.choice([e for e in EDGES if e <= bits])) + rng.randrange(-2, 3)
    return -edge if rng.random() < 0.3 else edge


def stored(rng: Random) -> int:
    """An integer that 64 bits with a sign hold."""
    return (integer(rng) + (1 << 63)) % (1 << 64) - (1 << 63)


def near(rng: Random, number: int) -> int:
    """A number that was there, a little or far off."""
    choices = (number + rng.randrange(-3, 4), -number, number * 2, number * 1000, number // 1000)
    return rng.choice(choices)


def text(rng: Random) -> str:
    """Odd, long, or of random characters."""
    if rng.random() < 0.7:
        return rng.choice(TEXTS)
    return "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0xD7FF)))) for _ in range(9))
