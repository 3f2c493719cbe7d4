"""Slices between stages: every element crosses once, to the rank that owns it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autopar.errors import VerificationError
from autopar.mesh import LogicalMesh
from autopar.placement import I, P, Placement, R, S, Spec, TensorType, all_specs, folds_of
from autopar.program.communication import Slice, local_factors, slices
from autopar.runtime.execute import shard
from tests.helpers.machines import mesh_of

MESHES = (
    ((1, 1), (1, 3)), ((2, 2), (1, 4)), ((2, 1), (1, 2)), ((1, 4), (2, 2)), ((2, 3), (3, 2)),
    ((4,), (2,)), ((2, 2, 2), (2, 1, 2)), ((1, 2, 3), (2, 2, 2)),
)  # fmt: skip
Dims = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Crossing:
    """A tensor that crosses between stages: its factors, and the spec and mesh at both ends."""

    dims: Dims
    source: Spec
    source_mesh: LogicalMesh
    target: Spec
    target_mesh: LogicalMesh
    folded: tuple[int | None, int | None] = (None, None)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(factors) for factors in self.dims)

    def slices(self) -> tuple[Slice, ...]:
        return slices(
            self.dims, self.source, self.source_mesh, self.target, self.target_mesh, self.folded
        )


def endings(dims: Dims, sizes: tuple[int, ...], whole: Placement) -> list[Spec]:
    """Every legal spec of shards and `whole`; axes of size 1 are Invariant or shards."""

    def ends(spec: Spec) -> bool:
        pairs = zip(spec.placements, sizes, strict=True)
        return all(p.is_shard or p == (I if n == 1 else whole) for p, n in pairs)

    return [spec for spec in all_specs(TensorType(dims, 8, True), sizes) if ends(spec)]


@st.composite
def crossings(draw: st.DrawFn) -> Crossing:
    """With strided factors, dims of one element, no dims, or several axes on one factor."""
    sizes = st.sampled_from((1, 2, 3, 4, 6, 8, 12))
    factors = st.lists(sizes, min_size=0, max_size=2).map(tuple)
    dims = tuple(draw(st.lists(factors, max_size=2)))
    first, second = draw(st.sampled_from(MESHES))
    source, target = (
        draw(st.sampled_from(endings(dims, sizes, whole)))
        for sizes, whole in ((first, R), (second, P))
    )
    folded = [
        draw(st.sampled_from([None, *foldable(dims, spec, sizes)]))
        for spec, sizes in ((source, first), (target, second))
    ]
    meshes = mesh_of(*first), mesh_of(*second, first_rank=math.prod(first))
    return Crossing(dims, source, meshes[0], target, meshes[1], (folded[0], folded[1]))


def foldable(dims: Dims, spec: Spec, sizes: tuple[int, ...]) -> list[int]:
    """The axes whose shards can be in head-tail order."""
    return [axis for axis in range(len(sizes)) if folds_of(dims, spec, axis, sizes) > 1]


def owns(spec: Spec, coordinate: Sequence[int]) -> bool:
    return all(p.is_shard or not c for p, c in zip(spec.placements, coordinate, strict=True))


def parts(
    whole: Tensor, dims: Dims, spec: Spec, mesh: LogicalMesh, folded: int | None, *, owned: bool
) -> dict[int, Tensor]:
    """What each rank holds; with `owned`, zeros on ranks that do not own their part."""
    out = {}
    for rank in mesh.ranks:
        coordinate = mesh.coordinate(rank)
        part = shard(whole, dims, spec, mesh.sizes, coordinate, folded=folded)
        empty = owned and not owns(spec, coordinate)
        out[rank] = torch.zeros_like(part) if empty else part.contiguous()
    return out


def numbered(shape: Sequence[int]) -> Tensor:
    """Elements 1, 2, ...: all different, none is 0."""
    return torch.arange(1, math.prod(shape) + 1).reshape(tuple(shape))


@given(crossings())
def test_slices_take_every_part_to_its_owner_and_gradients_back(case: Crossing) -> None:
    """Received P has gradient R, sent R has gradient P: whole on one rank, zeros on others."""
    source = case.dims, case.source, case.source_mesh, case.folded[0]
    target = case.dims, case.target, case.target_mesh, case.folded[1]
    sent, sent_back = (parts(numbered(case.shape), *end, owned=False) for end in (source, target))
    back, wanted = (parts(numbered(case.shape), *end, owned=True) for end in (source, target))
    found, covered, found_back = (
        {rank: torch.zeros_like(part) for rank, part in of.items()} for of in (wanted, wanted, back)
    )
    source_view = local_factors(case.dims, case.source, case.source_mesh.sizes)
    target_view = local_factors(case.dims, case.target, case.target_mesh.sizes)
    for piece in case.slices():
        value = sent[piece.source_rank].view(source_view)[piece.source]
        assert tuple(value.shape) == piece.shape
        assert piece.n_elements == value.numel() > 0
        found[piece.target_rank].view(target_view)[piece.target].copy_(value)
        covered[piece.target_rank].view(target_view)[piece.target].add_(1)
        gradient = sent_back[piece.target_rank].view(target_view)[piece.target]
        found_back[piece.source_rank].view(source_view)[piece.source].add_(gradient)
    for rank, part in wanted.items():
        assert torch.equal(found[rank], part)
        is_owner = owns(case.target, case.target_mesh.coordinate(rank))
        assert torch.equal(covered[rank], torch.full_like(part, int(is_owner)))
    for rank, part in back.items():
        assert torch.equal(found_back[rank], part)
    pairs = [(piece.source_rank, piece.target_rank) for piece in case.slices()]
    assert [pair for pair, _ in itertools.groupby(pairs)] == sorted(set(pairs))
    if case.folded == (None, None):
        assert len(pairs) == len(set(pairs)), "one slice per pair of ranks"


def test_a_tensor_without_elements_does_not_cross() -> None:
    assert not slices(((4,), (0,)), Spec((S(0),)), mesh_of(2), Spec((P,)), mesh_of(2, first_rank=2))


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("P", "P", r"cannot be sent at P on mesh {'dp': 2}: axis dp is P, not R or S"),
        ("I", "P", r"cannot be sent at I .*: axis dp is I"),
        ("R", "R", r"cannot be received at R .*: axis dp is R, not P or S"),
        ("R", "I", r"cannot be received at I .*: axis dp is I"),
        ("S(1)", "P", r"cannot be sent .*: S\(1\) has 3 elements, not divisible by 2"),
        ("S(0.1)", "P", r"cannot be sent .*names no factor"),
        ("R", "P P", r"cannot be received .*: 2 placements for 1 mesh axes"),
    ],
)
def test_specs_that_cannot_cross_are_refused(source: str, target: str, message: str) -> None:
    ends = Spec.parse(source), mesh_of(2), Spec.parse(target), mesh_of(2, first_rank=2)
    with pytest.raises(VerificationError, match=message):
        slices(((4,), (3,)), *ends)
