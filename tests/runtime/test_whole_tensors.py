"""`Sharded` tensors behave as the whole tensors do, whatever cuts them."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.errors import NotSupportedError
from autopar.placement import I, R, S, Spec
from autopar.program.lines import StoredParameter
from autopar.runtime.launch import ThreadWorld, run_threads
from autopar.runtime.state import StageState
from autopar.runtime.tensors import OfParameter, Sharded, Spread, stored_parameter
from tests.helpers.nightly import one_in
from tests.helpers.state_model import Sizes, pipeline_of, seeded_model, thread_place

MESHES: list[tuple[Sizes, ...]] = [((1, 1),), ((1, 2),), ((2, 2),), ((4,),), ((1, 3),)]
Values = tuple[Any, Any]

# Each takes two tensors that are cut alike, and is exact up to the order of sums.
ELEMENTWISE: dict[str, Callable[[Any, Any], Any]] = {
    "sum of two": lambda x, y: x + y,
    "product with a number": lambda x, y: x * 2.5,
    "addcdiv": lambda x, y: torch.addcdiv(x, y, y.abs() + 1, value=0.3),
    "lerp": lambda x, y: torch.lerp(x, y, 0.2),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "cast": lambda x, y: x.double().float(),
    "a 0-d tensor": lambda x, y: x / torch.tensor(3.0),
    "a whole tensor": lambda x, y: x * torch.ones(x.shape),
    "one that broadcasts": lambda x, y: x - torch.ones(x.shape[-1:] if x.dim() else ()),
    "like": lambda x, y: torch.zeros_like(x) + y,
    "new": lambda x, y: x.new_ones(x.shape) * y,
    "norm of another": lambda x, y: x / (y.norm() + 1),
    "in place": lambda x, y: x.clone().mul_(0.5).add_(y, alpha=2).clamp_(-1, 1),
    "out=": lambda x, y: torch.add(x, y, out=torch.zeros_like(x)),
    "list": lambda x, y: torch._foreach_add([x], [y])[0],
    "list in place": lambda x, y: in_list(x.clone(), y),
    "masked": lambda x, y: set_where(x.clone(), y),
    "same view": lambda x, y: x.view(x.shape) + x.expand(x.shape),
}
REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda x, y: (x * y).sum(),
    "mean": lambda x, y: x.mean(),
    "norm": lambda x, y: x.norm(),
    "norm 1": lambda x, y: torch.linalg.vector_norm(x, 1),
    "norm 3": lambda x, y: x.norm(3),
    "norm inf": lambda x, y: torch.linalg.vector_norm(x, math.inf),
    "norm -inf": lambda x, y: torch.linalg.vector_norm(x, -math.inf),
    "norm 0": lambda x, y: torch.linalg.vector_norm((x > 0).float(), 0),
    "max": lambda x, y: x.max(),
    "min": lambda x, y: x.min(),
    "amax": lambda x, y: x.amax(),
    "any": lambda x, y: (x > 100).any(),
    "all": lambda x, y: (x < 100).all(),
    "not all": lambda x, y: (x < x.max()).all(),
    "count": lambda x, y: (x > 0).count_nonzero(),
    "sum of booleans": lambda x, y: (x > 0).sum(),
    "norms of a list": lambda x, y: torch.stack(torch._foreach_norm([x, y])),
    "total norm": lambda x, y: torch.nn.utils.get_total_norm([x, y], foreach=True),
    "over all dims": lambda x, y: x.sum(dim=tuple(range(x.dim()))),
}
WHOLE: dict[str, Callable[[Any, Any], Any]] = {
    "over one dim": lambda x, y: x.sum(dim=0),
    "keeping dims": lambda x, y: x.norm(dim=-1, keepdim=True),
    "matmul": lambda x, y: x @ y.T,
    "view": lambda x, y: x.reshape(-1)[1:3] * 2,
    "writing to a view": lambda x, y: written(x.clone()),
    "writing to a view of a view": lambda x, y: written_deep(x.clone()),
    "reading a view after a write": lambda x, y: read_later(x.clone()),
    "whole in place": lambda x, y: x.sum(dim=0).mul_(y.sum(dim=0)),
    "a plain result of shards": lambda x, y: torch.ones(x.shape).mul_(x).add_(y),
}


def in_list(x: Tensor, y: Tensor) -> Tensor:
    torch._foreach_mul_([x], 0.5)
    torch._foreach_addcmul_([x], [y], [y], 0.1)
    return x


def set_where(x: Tensor, y: Tensor) -> Tensor:
    x[y > 0] = 7.0
    return x


def written(x: Tensor) -> Tensor:
    x[0] = 5.0
    return x


def written_deep(x: Tensor) -> Tensor:
    flat = x.view(-1)
    flat[1:4].mul_(3.0)
    flat[2] += 1.0
    return x


def read_later(x: Tensor) -> Tensor:
    flat = x.view(-1)
    x.mul_(2.0)
    return flat + 1.0


def whole_of(value: Any) -> Any:
    if isinstance(value, Sharded):
        return value.full_tensor()
    return value.current() if isinstance(value, OfParameter) else value


def other(whole: Tensor) -> Tensor:
    return torch.linspace(-2, 3, max(1, whole.numel())).view(whole.shape)


@one_in(3)
@pytest.mark.parametrize("shapes", MESHES, ids=str)
def test_every_operator(shapes: tuple[Sizes, ...]) -> None:
    pipeline = pipeline_of(shapes)
    values = {n: p.detach() for n, p in seeded_model().named_parameters()}

    def work(world: ThreadWorld) -> None:
        place = thread_place(pipeline, world)
        for p in place.parameters:
            plain: Values = values[p.name], other(values[p.name])
            for may_gather in (False, True):
                sizes, at = place.sizes, tuple(place.coordinate)
                spread = Spread(p, sizes, at, place.groups, may_gather=may_gather)
                cut: Values = (
                    Sharded(spread.local(plain[0]), spread),
                    Sharded(spread.local(plain[1]), spread),
                )
                cases = ELEMENTWISE | REDUCTIONS
                if (may_gather or spread.is_whole) and plain[0].dim() == 2:
                    cases = cases | WHOLE
                for name, case in cases.items():
                    found, expected = case(*cut), case(*plain)
                    if name in ELEMENTWISE:
                        assert isinstance(found, Sharded), name
                    message = f"{name} of {p.name} on {shapes}"
                    torch.testing.assert_close(
                        whole_of(found), expected, rtol=1e-5, atol=1e-5, msg=message
                    )
                    assert tuple(found.shape) == tuple(expected.shape), message

    run_threads(work, pipeline.n_ranks)


@pytest.mark.parametrize("name", WHOLE)
def test_a_shard_is_not_taken_for_the_whole(name: str) -> None:
    pipeline = pipeline_of(((1, 2),))

    def work(world: ThreadWorld) -> None:
        place = thread_place(pipeline, world)
        (p,) = (p for p in place.parameters if p.name == "qkv.weight")
        spread = Spread(p, place.sizes, tuple(place.coordinate), place.groups)
        x = Sharded(spread.local(torch.ones(p.shape)), spread)
        with pytest.raises(NotSupportedError, match=r"qkv\.weight"):
            WHOLE[name](x, x)

    run_threads(work, pipeline.n_ranks)


def cut_as(p: StoredParameter, spec: Spec, place: StageState, may_gather: bool = False) -> Spread:
    """The spread of a tensor like `p` that is cut by `spec`."""
    dims = tuple((n,) for n in p.shape)
    like = replace(p, name=f"{p.name} by {spec}", dims=dims, stored=replace(p.stored, spec=spec))
    at = tuple(place.coordinate)
    return Spread(like, place.sizes, at, place.groups, may_gather=may_gather)


def other_specs(p: StoredParameter, sizes: Sizes) -> list[Spec]:
    """Whole on every rank, in both ways, and cut along each dim by the last axis."""
    n, rest = sizes[-1], len(sizes) - 1
    cuts = [S(d) for d, size in enumerate(p.shape) if n > 1 and size % n == 0]
    return [Spec((how,) * len(sizes)) for how in (I, R)] + [Spec((I,) * rest + (c,)) for c in cuts]


@one_in(3)
@pytest.mark.parametrize("shapes", MESHES, ids=str)
def test_operands_that_are_cut_differently(shapes: tuple[Sizes, ...]) -> None:
    """A whole operand is cut, one that is cut otherwise gathered, whichever comes first."""
    pipeline = pipeline_of(shapes)
    values = {n: p.detach() for n, p in seeded_model().named_parameters()}

    def work(world: ThreadWorld) -> None:
        place = thread_place(pipeline, world)
        for p in place.parameters:
            plain: Values = values[p.name], other(values[p.name])
            own = Spread(p, place.sizes, tuple(place.coordinate), place.groups, may_gather=True)
            for spec in other_specs(p, place.sizes):
                spread = cut_as(p, spec, place, may_gather=True)
                for pair in ((own, spread), (spread, own)):
                    cut = [Sharded(s.local(v), s) for v, s in zip(plain, pair, strict=True)]
                    for name, case in ELEMENTWISE.items():
                        found, expected = case(*cut), case(*plain)
                        assert isinstance(found, Sharded), name
                        message = f"{name} of {p.name} on {shapes}, by {spec}"
                        torch.testing.assert_close(
                            found.full_tensor(), expected, rtol=1e-5, atol=1e-5, msg=message
                        )

    run_threads(work, pipeline.n_ranks)


def test_an_operand_that_is_cut_differently_is_gathered_only_if_allowed() -> None:
    pipeline = pipeline_of(((1, 2),))

    def work(world: ThreadWorld) -> None:
        place = thread_place(pipeline, world)
        (p,) = (p for p in place.parameters if p.name == "qkv.weight")
        rows, columns, whole = (cut_as(p, Spec((I, c)), place) for c in (S(0), S(1), I))
        x, y, z = (Sharded(s.local(torch.ones(p.shape)), s) for s in (rows, columns, whole))
        for combined in (
            lambda: x + y,
            lambda: x.add_(y),
            lambda: z.copy_(x),
            lambda: torch._foreach_lerp_([x], [y], 0.1),
        ):
            with pytest.raises(NotSupportedError, match="optimizer_gather"):
                combined()
        torch._foreach_lerp_([x], [z * 3], 0.5)
        assert torch.equal(x.full_tensor(), torch.full(p.shape, 2.0))
        assert isinstance(z + x, Sharded)
        z.copy_(x.full_tensor())
        assert torch.equal(z.local, torch.full(p.shape, 2.0))

    run_threads(work, pipeline.n_ranks)


def test_a_result_that_broadcasts_is_as_large_as_in_one_process() -> None:
    pipeline = pipeline_of(((1, 2),))

    def work(world: ThreadWorld) -> None:
        place = thread_place(pipeline, world)
        for p in place.parameters:
            if p.shape != (8,):
                continue
            spread = cut_as(p, Spec((I, S(0))), place, may_gather=True)
            x, many = Sharded(spread.local(torch.ones(8)), spread), torch.ones(4, 8)
            for found in (x * many, many * x, torch.where(many > 0, x, many)):
                assert torch.equal(whole_of(found), many)

    run_threads(work, pipeline.n_ranks)


def test_stages() -> None:
    """Values of two parameters are not combined, and none becomes a number."""
    pipeline = pipeline_of(((1, 1), (1, 2)))

    def work(world: ThreadWorld) -> None:
        place = thread_place(pipeline, world)
        first, second, *_ = (
            Sharded(spread.local(torch.ones(spread.shape)), spread)
            for p in place.parameters
            for spread in [Spread(p, place.sizes, tuple(place.coordinate), place.groups, 2)]
        )
        ratio = torch.where(first.norm() > 0, first.norm(), 1.0)
        scaled = first * ratio
        assert isinstance(scaled, Sharded)
        torch.testing.assert_close(scaled.local, first.local * math.sqrt(first.numel()))
        for combined in (
            lambda: first.norm() + second.norm(),
            lambda: torch.stack([first.norm(), second.norm()]),
            lambda: first.sum().item(),
            lambda: float(first.sum()),
            lambda: torch.nn.utils.get_total_norm([first, second]),
            lambda: torch.zeros(()).add_(first.sum()),
        ):
            with pytest.raises(NotSupportedError, match="stages"):
                combined()

    run_threads(work, pipeline.n_ranks)


def test_autograd_copies_and_pickles() -> None:
    pipeline = pipeline_of(((1, 2),))

    def work(world: ThreadWorld) -> None:
        place = thread_place(pipeline, world)
        for p in place.parameters:
            spread = Spread(p, place.sizes, tuple(place.coordinate), place.groups)
            whole = other(torch.empty(p.shape)).requires_grad_()
            x = stored_parameter(spread.local(whole), spread, True)
            for leaf in (x, whole):
                (leaf.pow(3).sum() + 0.5 * leaf.abs().mean()).backward()
            assert isinstance(x.grad, Sharded)
            assert whole.grad is not None
            torch.testing.assert_close(x.grad.full_tensor(), whole.grad)
            twin = copy.deepcopy(x)
            assert isinstance(twin, torch.nn.Parameter)
            with torch.no_grad():
                twin.add_(1.0)
            assert isinstance(x, Sharded)
            torch.testing.assert_close(x.full_tensor(), whole.detach())
            with pytest.raises(NotSupportedError, match="full_state_dict"):
                pickle.dumps(x)
            if not spread.is_whole:
                with pytest.raises(NotSupportedError, match="other numbers"):
                    torch.nn.init.normal_(x)

    run_threads(work, pipeline.n_ranks)
