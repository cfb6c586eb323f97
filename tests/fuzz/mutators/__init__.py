"""Changes to inputs, by their form: each function makes another input of one that is given.

All take a source of random numbers and bytes, and give bytes; what is no input of the form any
more is changed byte by byte.
"""

from collections.abc import Callable
from random import Random

Mutator = Callable[[Random, bytes], bytes]
