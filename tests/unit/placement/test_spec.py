"""Placements and specs: text, canonical order, local shapes, what is legal."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import OptionError
from autopar.placement import (
    I,
    P,
    Placement,
    R,
    S,
    Spec,
    TensorType,
    all_specs,
    gather,
    gradient_spec,
    illegal_reason,
    local_bytes,
    local_dims,
    local_shape,
    scatter,
    without_gradient,
)
from tests.helpers.strategies import AXIS_SIZES, placements, reshards, specs, tensor_types

FUSED = TensorType(((3, 4, 2), (8,)), 4, True)  # 3 x heads x head_dim, and a model width


@given(specs())
def test_spec_text(spec: Spec) -> None:
    assert Spec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (Spec((I, R, P)), "I R P"),
        (Spec((S(2), S(0, 1))), "S(2) S(0.1)"),
        (Spec.of((S(0), S(0)), (1, 0)), "S(0) S(0) order 1,0"),
        (Spec.of((S(0), R, S(0)), (1, 2, 0)), "S(0) R S(0) order 2,1,0"),
    ],
)
def test_how_specs_are_written(spec: Spec, text: str) -> None:
    assert str(spec) == text


@pytest.mark.parametrize(
    "text", ["X", "S", "S()", "S(-1)", "S(0.)", "s(0)", "I R order 0", "R R order 1,1", "R order x"]
)
def test_malformed_text(text: str) -> None:
    with pytest.raises(OptionError):
        Spec.parse(text)


class TestOrder:
    @given(st.lists(placements(), min_size=1, max_size=3), st.data())
    def test_it_keeps_only_what_axes_on_one_factor_need(
        self, placed: list[Placement], data: st.DataObject
    ) -> None:
        order = data.draw(st.permutations(range(len(placed))))
        spec = Spec.of(placed, order)
        assert Spec.of(spec.placements, spec.order) == spec
        for cell in {p.cell for p in placed if p.is_shard}:
            axes = [a for a in order if placed[a].is_shard and placed[a].cell == cell]
            assert spec.axes_of(cell) == tuple(axes)
        if len({p.cell for p in placed if p.is_shard}) == sum(p.is_shard for p in placed):
            assert spec.order == ()

    def test_plain_axis_order_is_not_written(self) -> None:
        assert Spec.of((S(0), S(0)), (0, 1)) == Spec((S(0), S(0)))
        assert Spec.of((S(0), S(1)), (1, 0)) == Spec((S(0), S(1)))

    def test_the_outer_axis_takes_the_larger_blocks(self) -> None:
        x = torch.arange(8)
        row = TensorType(((8,),), 8, False)
        random = torch.Generator()
        plain = scatter(x, row, Spec((S(0), S(0))), (2, 2), random)
        swapped = scatter(x, row, Spec.of((S(0), S(0)), (1, 0)), (2, 2), random)
        assert [p.tolist() for p in plain] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert [p.tolist() for p in swapped] == [[0, 1], [4, 5], [2, 3], [6, 7]]


class TestLocal:
    def test_shapes(self) -> None:
        spec = Spec((S(0, 1), S(1)))
        assert local_dims(FUSED, spec, (2, 4)) == ((3, 2, 2), (2,))
        assert local_shape(FUSED, spec, (2, 4)) == (12, 2)
        assert local_bytes(FUSED, spec, (2, 4)) == 12 * 2 * 4

    def test_a_shard_of_an_inner_factor_is_strided(self) -> None:
        x = torch.arange(24).unsqueeze(1).expand(24, 8)
        first, second = scatter(x, FUSED, Spec((S(0, 1),)), (2,), torch.Generator())
        assert first[:, 0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19]
        assert second[:, 0].tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]

    @given(reshards())
    def test_gather_undoes_scatter(
        self, case: tuple[TensorType, tuple[int, ...], Spec, Spec]
    ) -> None:
        tensor, sizes, spec, _ = case
        random = torch.Generator().manual_seed(0)
        x = torch.randn(tensor.shape, generator=random, dtype=torch.float64)
        shards = scatter(x, tensor, spec, sizes, random)
        assert {tuple(s.shape) for s in shards} == {local_shape(tensor, spec, sizes)}
        assert local_bytes(tensor, spec, sizes) == shards[0].nbytes
        whole, spread = gather(shards, tensor, spec, sizes)
        torch.testing.assert_close(whole, x, rtol=0, atol=1e-14)
        assert spread == 0.0


class TestLegal:
    @given(tensor_types(), st.sampled_from(AXIS_SIZES))
    def test_all_specs_are_legal_and_distinct(
        self, tensor: TensorType, sizes: tuple[int, ...]
    ) -> None:
        found = all_specs(tensor, sizes)
        assert len(set(found)) == len(found)
        for spec in found:
            assert illegal_reason(tensor, spec, sizes) is None
            assert Spec.of(spec.placements, spec.order) == spec
            if not tensor.has_grad:
                assert without_gradient(spec, sizes) == spec

    @given(tensor_types(max_cells=3), st.sampled_from(AXIS_SIZES))
    def test_all_specs_are_all(self, tensor: TensorType, sizes: tuple[int, ...]) -> None:
        options = (I, R, P, *(S(*cell) for cell in tensor.cells))
        expected = {
            spec
            for placed in itertools.product(options, repeat=len(sizes))
            for order in itertools.permutations(range(len(sizes)))
            for spec in (Spec.of(placed, order),)
            if illegal_reason(tensor, spec, sizes) is None
            and (tensor.has_grad or without_gradient(spec, sizes) == spec)
        }
        assert set(all_specs(tensor, sizes)) == expected

    @pytest.mark.parametrize(
        ("placed", "sizes", "reason"),
        [
            ((R,), (2, 2), "1 placements for 2 mesh axes"),
            ((R,), (1,), "axis 0 has one rank, where only I is meaningful, not R"),
            ((S(0, 3),), (2,), "S(0.3) names no factor of a tensor with factors ((3, 4, 2), (8,))"),
            ((S(2),), (2,), "S(2) names no factor"),
            ((S(0),), (2,), "S(0) has 3 elements, not divisible by 2 ranks"),
            ((S(0, 1), S(0, 1)), (2, 4), "S(0.1) has 4 elements, not divisible by 8 ranks"),
        ],
    )
    def test_reasons(
        self, placed: tuple[Placement, ...], sizes: tuple[int, ...], reason: str
    ) -> None:
        found = illegal_reason(FUSED, Spec(placed), sizes)
        assert found is not None
        assert re.match(re.escape(reason), found)


def test_gradients_of_specs() -> None:
    spec = Spec.of((S(0), R, P, I, S(0)), (4, 1, 2, 3, 0))
    assert str(gradient_spec(spec)) == "S(0) P R I S(0) order 4,1,2,3,0"
    assert gradient_spec(gradient_spec(spec)) == spec


@pytest.mark.parametrize(("own", "gradient", "itemsize"), [(2, 4, 4), (4, 2, 2), (2, 0, 2)])
def test_bytes_of_a_gradient_in_another_precision(own: int, gradient: int, itemsize: int) -> None:
    tensor = TensorType(((6,), (8,)), own, True, gradient)
    assert tensor.gradient_bytes(24 * own) == 24 * itemsize
