"""Ring attention: rows, keys and values on shards of one sequence."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autopar
from autopar.placement import Split
from autopar.rules import rule_for
from autopar.rules.lowering import RING_ATTENTION
from autopar.runtime.groups import Group, Recorder
from autopar.runtime.launch import ThreadWorld, run_threads
from autopar.runtime.lowered import ring_attention
from tests.helpers.harness import generated_code, thread_step
from tests.helpers.machines import mesh_of
from tests.helpers.nightly import nightly
from tests.helpers.tensors import random_tensor
from tests.rules.test_attention_lowering import ATTENTION, Attends, Placed

__all__ = ["generated_code"]

ROWS = Split(2)


def group(world: ThreadWorld) -> Group:
    """The group of all ranks; four ranks are two merged axes."""
    mesh = mesh_of(2, 2) if world.n_ranks == 4 else mesh_of(world.n_ranks)
    return world.make_groups(mesh)[mesh.active_axes]


def differences(
    tensors: tuple[Tensor, ...], n_ranks: int, is_causal: bool = True, folded: bool = False
) -> list[float]:
    """Of the results and of the gradients, on any rank, from attention on one process in float64.

    `tensors` are query, key, value, and the gradient of the results.
    """
    grouped = tensors[1].shape[1] < tensors[0].shape[1]
    q, k, v = (x.detach().double().requires_grad_() for x in tensors[:3])
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=grouped)
    whole = torch.autograd.grad(expected, (q, k, v), tensors[3].double())
    found: list[list[float]] = []

    def work(world: ThreadWorld) -> None:
        g, rows = group(world), Split(2, folds=n_ranks if folded else 1)
        local = [g.slice(x, rows).requires_grad_() for x in tensors[:3]]
        out = ring_attention(*local, g, is_causal, None, grouped, folded)
        gradients = torch.autograd.grad(out, local, g.slice(tensors[3], rows))
        pairs = zip((out.detach(), *gradients), (expected.detach(), *whole), strict=True)
        found.append([float((a.double() - g.slice(b, rows)).abs().max()) for a, b in pairs])

    run_threads(work, n_ranks)
    return [max(of_ranks) for of_ranks in zip(*found, strict=True)]


def tensors(
    dtype: torch.dtype, n_key_heads: int = 4, n_features: tuple[int, int] = (8, 8), lead: int = 2
) -> tuple[Tensor, ...]:
    e, f = n_features
    shapes = [(lead, 4, 24, e), (lead, n_key_heads, 24, e), (lead, n_key_heads, 24, f)]
    every = [*shapes, (lead, 4, 24, f)]
    return tuple(random_tensor(i, *shape).to(dtype) for i, shape in enumerate(every))


@pytest.mark.parametrize("kernels", ["flash", "blocks"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_it_is_attention_on_one_process(
    kernels: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in head-tail order, with heads that share keys, and values with more or fewer features
    than keys."""
    if kernels == "blocks":
        ring = sys.modules[ring_attention.forward.__module__]
        pair = ring._block_attention, ring._block_attention_backward
        monkeypatch.setattr(ring, "_kernels_of", lambda x: pair)
    for n_ranks, n_key_heads, n_features, folded in itertools.product(
        (2, 3, 4), (4, 2), ((8, 8), (8, 4), (4, 8)), (False, True)
    ):
        given = tensors(torch.float64, n_key_heads, n_features)
        found = differences(given, n_ranks, is_causal, folded)
        assert max(found) < 1e-13, (n_ranks, n_key_heads, n_features, folded, found)


def test_half_precision_is_added_in_float32() -> None:
    """Gradients are as near to float64 as those of one kernel over all keys."""
    given = tensors(torch.bfloat16)
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        q, k, v = (x.to(dtype).requires_grad_() for x in given[:3])
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        gradients.append(torch.autograd.grad(out, (q, k, v), given[3].to(dtype)))
    usual = [float((a.double() - b).abs().max()) for a, b in zip(*gradients, strict=True)]
    _, *found = differences(given, 4)
    assert all(a <= 2 * b for a, b in zip(found, usual, strict=True)), (found, usual)


def test_any_number_of_dims_before_the_rows() -> None:
    given = tensors(torch.float64, lead=6)
    for shape in ((4,), (2, 3, 4)):
        q, k, v, _ = (
            x[:1].squeeze(0) if len(shape) == 1 else x.unflatten(0, (2, 3)) for x in given
        )
        rows = Split(q.dim() - 2)
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def work(world: ThreadWorld) -> None:
            g = group(world)
            local = [g.slice(x, rows) for x in (q, k, v)]  # noqa: B023
            out = ring_attention(*local, g, True, None, False)
            torch.testing.assert_close(out, g.slice(expected, rows), rtol=0, atol=1e-14)  # noqa: B023

        run_threads(work, 2)


def test_messages_go_round_once_and_gradients_come_home() -> None:
    """p - 1 messages forward, p - 1 of keys and p - 1 of gradients backward."""

    def work(world: ThreadWorld) -> None:
        g = group(world)
        with Recorder() as recorder:
            local = [g.slice(x, ROWS).requires_grad_() for x in tensors(torch.float64)[:3]]
            ring_attention(*local, g, True, None, False).sum().backward()
        kinds = [(call.kind, call.phase) for call in recorder.calls]
        assert kinds == [("send_recv", "forward")] * 2 + [("send_recv", "backward")] * 4

    run_threads(work, 3)


@pytest.mark.parametrize(("heads", "sizes"), [((6, 2), (4,)), ((6, 6), (2, 2))])
def test_a_plan_with_a_ring_trains_as_one_process(
    heads: tuple[int, int], sizes: tuple[int, ...]
) -> None:
    """Where heads do not divide, or would be gathered; also with grouped queries."""
    placed = Placed.of(heads, sizes)
    assert placed.attention.lowered == RING_ATTENTION
    step = thread_step(placed.analysis, placed.cost, placed.strategy, placed.batch, 0)
    assert step.wrong == {}
    assert step.calls == step.foretold


WAYS = {"ring": ("c t", "s t"), "gather": ("c",), "heads": ()}


@nightly
@pytest.mark.parametrize(("n_heads", "n_rows"), [*itertools.product((16, 25), (2048, 65536))])
def test_the_way_that_is_chosen_is_the_fastest(
    n_heads: int, n_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 1% of each way by itself: a ring, keys gathered, or sequences exchanged for heads."""
    with torch.device("meta"):
        model = Attends(64 * n_heads, n_heads, n_heads, n_layers=2).bfloat16()
        x = torch.empty(1, n_rows, 64 * n_heads).bfloat16()
    mesh = autopar.Mesh((1, 8), hardware="h100-sxm")

    def step_s() -> float:
        plan = autopar.plan(model, mesh, {"x": x}, stages=1, mesh_shape="as-given")
        return plan.predicted.step_time_s

    found_s, rule = step_s(), rule_for(ATTENTION)
    each_s = {}
    for way, names in WAYS.items():
        only = replace(rule, lower={name: rule.lower[name] for name in names})
        monkeypatch.setitem(vars(sys.modules[rule_for.__module__])["_registry"], ATTENTION, only)
        each_s[way] = step_s()
    assert found_s <= 1.01 * min(each_s.values()), (found_s, each_s)
