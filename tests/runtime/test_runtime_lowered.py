"""Vocabulary-sharded embedding and cross-entropy against torch, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.placement import Split
from autopar.runtime.groups import Group
from autopar.runtime.launch import ThreadWorld, run_threads
from autopar.runtime.lowered import vocab_parallel_cross_entropy, vocab_parallel_embedding
from tests.helpers.differentiable import moved
from tests.helpers.machines import mesh_of
from tests.helpers.tensors import random_tensor

N_VOCAB, N_ROWS = 12, 9
IDS = torch.tensor([[0, 5, 11], [3, 3, 7], [8, 0, 2]])


def group(world: ThreadWorld) -> Group:
    """The group of all ranks; four ranks are two merged axes."""
    mesh = mesh_of(2, 2) if world.n_ranks == 4 else mesh_of(world.n_ranks)
    return world.make_groups(mesh)[mesh.active_axes]


@pytest.mark.parametrize("padding_idx", [-1, 0, 3, 8])
@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_embedding(n_ranks: int, padding_idx: int) -> None:
    table, upstream = random_tensor(0, N_VOCAB, 5), random_tensor(1, *IDS.shape, 5)
    whole = table.clone().requires_grad_()
    expected = torch.ops.aten.embedding.default(whole, IDS, padding_idx)
    expected.backward(upstream)
    assert whole.grad is not None
    gradient = whole.grad

    def work(world: ThreadWorld) -> None:
        g = group(world)
        local = g.slice(table, Split(0)).requires_grad_()
        out = moved("p_to_r", vocab_parallel_embedding(local, IDS, g, padding_idx), g)
        assert torch.equal(out, expected)
        # The consumer's gradient is Partial; keep it on one rank.
        out.backward(g.keep_first(upstream))
        assert local.grad is not None
        assert not local.grad.is_sparse
        torch.testing.assert_close(local.grad, g.slice(gradient, Split(0)), rtol=0, atol=1e-14)

    run_threads(work, n_ranks)


def labels(kind: str) -> Tensor:
    out = torch.tensor([0, 5, 11, 3, 3, 7, 8, 0, 2])
    if kind == "some ignored":
        out[[1, 4, 8]] = -100
    elif kind == "all ignored":
        out[:] = -100
    return out


@pytest.mark.parametrize("kind", ["none ignored", "some ignored", "all ignored"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_cross_entropy(n_ranks: int, smoothing: float, kind: str) -> None:
    y = labels(kind)
    # The shift overflows exp() unless the maximum of the whole row is subtracted.
    logits = random_tensor(2, N_ROWS, N_VOCAB) * 20 + 800
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, y, reduction="sum", label_smoothing=smoothing)
    (expected * 0.3).backward()
    assert whole.grad is not None
    gradient = whole.grad

    def work(world: ThreadWorld) -> float:
        g = group(world)
        shared = logits.clone().requires_grad_()
        local = moved("i_to_s", shared, g, 1)
        loss = vocab_parallel_cross_entropy(local, y, g, label_smoothing=smoothing)
        torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-12)
        (loss * 0.3).backward()
        assert shared.grad is not None
        torch.testing.assert_close(shared.grad, gradient, rtol=0, atol=1e-13)
        return loss.item()

    assert len(set(run_threads(work, n_ranks))) == 1


def test_cross_entropy_with_another_ignore_index_and_masked_vocabulary() -> None:
    y = torch.tensor([0, 5, 3, 3])
    logits = random_tensor(3, 4, N_VOCAB)
    logits[:, 6:] = -torch.inf  # a shard without a finite entry
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, y, reduction="sum", ignore_index=3)
    expected.backward()

    def work(world: ThreadWorld) -> None:
        g = group(world)
        local = g.slice(logits, Split(1)).requires_grad_()
        loss = vocab_parallel_cross_entropy(local, y, g, ignore_index=3)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
        assert whole.grad is not None
        torch.testing.assert_close(local.grad, g.slice(whole.grad, Split(1)), rtol=0, atol=1e-14)

    run_threads(work, 2)


def test_half_precision_loss_is_computed_in_float32() -> None:
    logits, y = random_tensor(4, N_ROWS, N_VOCAB).bfloat16(), labels("some ignored")
    expected = F.cross_entropy(logits.float(), y, reduction="sum").bfloat16()

    def work(world: ThreadWorld) -> None:
        g = group(world)
        local = g.slice(logits, Split(1)).requires_grad_()
        loss = vocab_parallel_cross_entropy(local, y, g)
        loss.backward()
        assert torch.equal(loss, expected)
        assert local.grad is not None
        assert local.grad.dtype == torch.bfloat16

    run_threads(work, 2)


@pytest.mark.parametrize("wrong", [N_VOCAB, -1])
def test_ids_outside_the_vocabulary_fail_as_in_torch(wrong: int) -> None:
    def embedding(world: ThreadWorld) -> None:
        vocab_parallel_embedding(torch.ones(6, 2), torch.tensor([wrong]), group(world))

    def cross_entropy(world: ThreadWorld) -> None:
        vocab_parallel_cross_entropy(torch.ones(1, 6), torch.tensor([wrong]), group(world))

    with pytest.raises(IndexError, match="out of range"):
        run_threads(embedding, 2)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        run_threads(cross_entropy, 2)
