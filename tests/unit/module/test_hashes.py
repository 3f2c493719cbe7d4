"""Fingerprints see every element at its position, in every dtype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autopar.module.agreement import fingerprints
from autopar.module.agreement.hashes import content_hash, digest

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn,
)  # fmt: skip


def drawn(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    values = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(0))
    return values.remainder(2).bool() if dtype is torch.bool else values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_counts_at_its_position(dtype: torch.dtype) -> None:
    x = drawn(dtype, (5, 7))
    known = {content_hash(x)}
    assert content_hash(x.clone()) in known
    for i in range(x.numel()):
        other = x.clone()
        flat = other.view(-1)
        flat[i] = ~flat[i] if dtype is torch.bool else (-1 - flat[i].to(torch.complex64)).real
        assert content_hash(other) not in known
        known.add(content_hash(other))
    if dtype is not torch.bool:
        assert content_hash(x.flip(0)) not in known
        assert content_hash(x.T) not in known


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_signs_and_nan(dtype: torch.dtype) -> None:
    """A sign is one high bit: an even number of them must not cancel."""
    x = drawn(dtype, (8,)) + 1
    nan = x.clone()
    nan[3] = float("nan")
    assert content_hash(-x) != content_hash(x)
    assert content_hash(nan) == content_hash(nan.clone()) != content_hash(x)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8), st.data())
def test_integers_that_differ(values: list[int], data: st.DataObject) -> None:
    x = torch.tensor(values, dtype=torch.int64)
    other = torch.tensor(data.draw(st.permutations(values)), dtype=torch.int64)
    assert (content_hash(x) == content_hash(other)) == torch.equal(x, other)


def test_large_tensors_are_hashed_in_parts() -> None:
    """A position is one of the whole tensor, also behind the first 2^20 words."""
    x = torch.arange(2**20 + 8, dtype=torch.int32)
    swapped = x.clone()
    swapped[[0, 2**20]] = x[[2**20, 0]]
    assert content_hash(swapped) != content_hash(x) == content_hash(x.clone())


def test_views_are_hashed_as_what_they_show() -> None:
    x = drawn(torch.complex64, (4, 6))
    for view in (x.T, x[:, ::2], x[1], x[1, 1], x.conj(), x.expand(3, 4, 6), x[:0]):
        assert content_hash(view) == content_hash(view.clone().contiguous())


def test_leaves_of_a_batch() -> None:
    batch = {"x": torch.ones(2, 3), "flags": [True, None], "other": object()}
    found = fingerprints(batch)
    assert {path: leaf.form for path, leaf in found.items()} == {
        "x": "float32 (2, 3)", "flags.0": "True", "flags.1": "None", "other": "a object",
    }  # fmt: skip
    assert digest(found) == digest(fingerprints({**batch, "other": object()}))
    assert digest(found) != digest(fingerprints({**batch, "x": torch.ones(3, 2)}))
    assert fingerprints({"x": torch.ones(2, device="meta")})["x"].content == 0
