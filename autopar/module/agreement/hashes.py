"""Fingerprints of batches: ranks compare a few numbers instead of the tensors.

    hash(x)  =  Σ_i mix(w_i + (i + 1)·c)  mod 2^64      w_i: the i-th word of x, as an integer

`mix` is the finaliser of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014) and c its odd constant. Every element counts, at its position. Words are
the bits of an element, so NaN and bool are exact. The sum is of integers, so its order does not
matter and CPU and GPU agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from autopar.program.graph import flatten_inputs

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
# Words at once: a few temporaries of 8 MiB, however large the batch is.
_N_AT_ONCE = 1 << 20
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True)
class Fingerprint:
    """One leaf of a batch: `form` is its dtype and shape, or its value if it is no tensor."""

    form: str
    content: int = 0


def fingerprints(
    batch: Mapping[str, Any] | Sequence[Any], with_content: bool = True
) -> dict[str, Fingerprint]:
    """Path -> fingerprint of a leaf; without content, only its form."""
    return {path: _of_leaf(v, with_content) for path, v in flatten_inputs(batch).items()}


def digest(value: object) -> int:
    """A signed 64-bit number of the value's `repr`, the same in every process."""
    found = hashlib.sha256(repr(value).encode()).digest()
    return int.from_bytes(found[:8], "big", signed=True)


def content_hash(tensor: Tensor) -> int:
    """The hash of a tensor's bits in row-major order; its shape and dtype are not part of it."""
    whole = tensor.detach().resolve_conj().resolve_neg()
    if whole.is_complex():
        whole = torch.view_as_real(whole)
    words = whole.contiguous().reshape(-1).view(_WORDS[whole.element_size()])
    total = 0
    for start in range(0, len(words), _N_AT_ONCE):
        part = words[start : start + _N_AT_ONCE].to(torch.int64)
        index = torch.arange(start + 1, start + 1 + len(part), device=part.device)
        total += int(_mix(part + index * _GOLDEN).sum())
    return total % (1 << 64)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


def _of_leaf(value: Any, with_content: bool) -> Fingerprint:
    if isinstance(value, Tensor):
        form = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        has_bits = value.layout is torch.strided and not (
            value.is_meta or isinstance(value, FakeTensor)
        )
        return Fingerprint(form, content_hash(value) if with_content and has_bits else 0)
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None), torch.dtype)):
        return Fingerprint(repr(value))
    return Fingerprint(f"a {type(value).__qualname__}")  # its repr may name an address
