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
from tests.helpers.machines import mesh_of
from tests.helpers.tensors import random_tensor

N_VOCAB, N_ROWS = 12, 9
IDS = torch.tensor([[0, 5, 11], [3, 3, 7], [8, 0, 2]])


def group(world: ThreadWorld) -> Group:
    """The group of all ranks; four ranks are two merged axes."""
    mesh = mesh_of(2, 2) if world.n_ranks == 4 else mesh_of(world.n_ranks)
    return world.make_groups(mesh)[mesh.active_axes]


def labels(kind: str) -> Tensor:
    out = torch.tensor([0, 5, 11, 3, 3, 7, 8, 0, 2])
    if kind == "some ignored":
        out[[1, 4, 8]] = -100
    elif kind == "all ignored":
        out[:] = -100
    return out


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
