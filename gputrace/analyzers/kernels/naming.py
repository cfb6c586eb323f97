"""The telling part of a kernel's name, which templates and namespaces surround."""

from __future__ import annotations

import re
from typing import Final

_UNNAMED: Final = re.compile(r"(\(anonymous namespace\)|<unnamed>|\{anonymous\})::")
_RETURNS: Final = re.compile(r"^(std::enable_if<.*?>::type|void|bool|int)\s+")
_WRAPPER: Final = re.compile(r"(^|::)(Kernel2?|device_kernel|GemmUniversal|run_kernel|kernel)$")
"""Functions of CUTLASS that carry the name of the kernel proper as a template argument."""
_CUTLASS: Final = re.compile(r"cutlass\w*_(tensorop|simt|wmma)\w*|cutlass\w*?_\d+_\w+")
_TEMPLATE: Final = re.compile(r"\w+(?=<)")
_INSIDE: Final = re.compile(r"\w*(Functor\w*|_kernel_cuda|_kernel_impl|Ops)\b")
"""What an elementwise or a reducing kernel of PyTorch does, among its template arguments."""

_LONGEST: Final = 120


def function_name(name: str) -> str:
    """The function's name with its namespaces, without types and arguments."""
    return re.split(r"[<(]", _bare(name), maxsplit=1)[0].strip()


def own_name(name: str) -> str:
    """As `function_name`, but CUTLASS's wrappers with their types, which say what they are."""
    own = function_name(name)
    return _bare(name) if not own or _WRAPPER.search(own) else own


def _bare(name: str) -> str:
    return _RETURNS.sub("", _UNNAMED.sub("", name))


def short_name(name: str) -> str:
    """A name for people: ``vectorized_elementwise: CUDAFunctor_add``."""
    bare, own = _bare(name), function_name(name)
    inside = bare[len(own) + 1 :]
    if _WRAPPER.search(own):
        known = _CUTLASS.search(inside) or _TEMPLATE.search(inside)
        return known[0] if known else bare[:_LONGEST]
    found = _INSIDE.search(inside)
    base = own.rsplit("::", 1)[-1] or bare
    told = f"{base.removesuffix('_kernel')}: {found[0]}" if found else base
    return told[:_LONGEST]
