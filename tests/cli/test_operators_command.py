"""`autopar ops`: its report on operators, and on dims that do not divide over a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.cli import shell
from autopar.cli.operators import Status, UnevenDim, operator_uses, ops_result, uneven_dims
from tests.helpers.capture_harness import Module
from tests.helpers.commands import command, good

N_IDS, WIDTH = 97, 12


class Words(nn.Module):
    """A vocabulary of 97 tied to a head without bias, 10 features, and a batch norm."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.table = nn.Embedding(N_IDS, WIDTH)
        self.up, self.norm = nn.Linear(WIDTH, 10), nn.BatchNorm1d(10)
        self.down, self.head = nn.Linear(10, WIDTH), nn.Linear(WIDTH, N_IDS, bias=False)
        self.head.weight = self.table.weight
        self.between = between

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.norm(self.up(self.table(ids)).flatten(0, 1))
        logits = self.head(self.down(self.between(rows)))
        return nn.functional.cross_entropy(logits, ids.flatten())


RARE = "aten.fake_quantize_per_tensor_affine_cachemask.default"


def rounded(x: Tensor) -> Tensor:
    return torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255)


def words() -> tuple[nn.Module, dict[str, Tensor]]:
    """A model factory for the command line."""
    return Words(), {"ids": torch.arange(32).view(8, 4)}


def rare_words() -> tuple[nn.Module, dict[str, Tensor]]:
    return Words(rounded), words()[1]


@pytest.fixture(scope="module")
def answer() -> Any:
    """The JSON of `autopar ops` on four ranks."""
    return good(command("ops", f"{__name__}:words", "--mesh", "1x4", "--json"))


def test_rules_are_own_or_derived(answer: Any) -> None:
    rules = {use["op"]: (use["status"], use["rule"]) for use in answer["operators"]}
    assert rules["aten.linear.default"] == ("covered", "own")
    assert rules["aten.tanh.default"] == ("covered", "derived")
    assert answer["missing"] == answer["replicated"] == []
    counts = {use["op"]: use["count"] for use in answer["operators"]}
    assert counts["aten.linear.default"] == 3


def test_what_is_replaced_when_sharded(answer: Any) -> None:
    replaced = {
        r["function"]: (r["names"], r["collectives"])
        for use in answer["operators"]
        for r in use["replaced"]
    }
    assert replaced == {
        "vocab_parallel_embedding": ("v", []),
        "vocab_parallel_cross_entropy": ("v", ["3 all_reduce forward"]),
        "synchronised_batch_norm_with_statistics": (
            "n", ["1 all_gather forward", "1 all_reduce backward"],
        ),
    }  # fmt: skip


def test_dims_that_four_ranks_cannot_share(answer: Any) -> None:
    dims = {(d["parameter"], d["dim"]): d for d in answer["uneven_dims"]}
    assert dims["table.weight", 0]["padded_to"] == 100
    names = {name for name, _ in dims}
    assert names == {
        "table.weight", "up.weight", "up.bias", "norm.weight", "norm.bias", "down.weight",
    }  # fmt: skip
    assert dims["down.weight", 1]["reason"] == "4 ranks do not divide 10"
    assert dims["down.weight", 1]["most_ranks"] == 2


def test_a_vocabulary_that_is_not_padded_says_why() -> None:
    class Summed(Words):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + torch.logsumexp(self.head.weight, 0).mean()

    dims = uneven_dims(capture(Summed(), words()[1]), 4)
    (row,) = [d for d in dims if (d.parameter, d.dim) == ("table.weight", 0)]
    assert row.padded_to is None
    assert row.reason.startswith("aten.logsumexp.default meets it at ")


def test_two_axes_can_share_what_one_cannot() -> None:
    """A dim of factors 2 x 6 divides over 2 x 2 ranks, but not over one axis of 4."""
    split = Module(lambda self, x: self.linear(x).unflatten(-1, (2, 6)).sum())
    split.linear, why = nn.Linear(12, 2 * 6), "8 ranks do not divide 12"
    program = capture(split, {"x": torch.ones(8, 12)})
    assert uneven_dims(program, 4) == []
    assert uneven_dims(program, 8) == [
        UnevenDim("linear.weight", 0, 12, (2, 6), 4, None, why),
        UnevenDim("linear.weight", 1, 12, (12,), 4, None, why),
        UnevenDim("linear.bias", 0, 12, (2, 6), 4, None, why),
    ]


@pytest.mark.parametrize(
    ("fallback", "status", "code"),
    [("error", "missing", shell.FAILED_CHECK), ("replicate", "replicated", shell.GOOD)],
)
def test_an_operator_without_a_rule(fallback: str, status: Status, code: int) -> None:
    result = command("ops", f"{__name__}:rare_words", "--fallback", fallback, "--mesh", "4")
    assert result.exit_code == code
    assert result.stdout.splitlines()[1].split() == [RARE, "1", status]
    if fallback == "error":
        assert "parameters on 4 ranks: not examined" in result.stdout
        assert f"no rule\n  at {__file__}:" in result.stdout
    else:
        assert result.stdout.endswith(" covered, 1 replicated\n")


def test_a_call_that_its_rule_refuses() -> None:
    class Sparse(Words):
        def __init__(self) -> None:
            super().__init__()
            self.table.sparse = True

    result = ops_result(operator_uses(capture(Sparse(), words()[1])))
    assert not result.ok
    assert result.facts()["missing"] == ["aten.embedding.default"]
    assert "sparse gradients of an embedding are not supported" in result.text
