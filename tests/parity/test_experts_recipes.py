"""Whole mixtures of experts in Megatron's recipes: `Manual(ep=, etp=)` against one process."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Manual, OptionError
from tests.helpers.jobs import machine
from tests.helpers.models.moe_models import moe_model
from tests.helpers.nightly import nightly

N_TOKENS, VOCABULARY = 4, 16
ROUTER_LOSS = {"output_router_logits": True}
SEQUENCES: dict[str, Any] = {"sp": True}
# Rows of the batch: one sequence, where sequences are split. DeepSeek-V3 balances without a loss.
CASES: list[tuple[str, int, Manual, dict[str, Any]]] = [
    ("mixtral", 4, Manual(dp=2, ep=2), ROUTER_LOSS),
    ("mixtral", 4, Manual(dp=4, ep=2, zero=1), ROUTER_LOSS),
    ("mixtral", 4, Manual(dp=4, ep=4, zero=3), {}),
    ("mixtral", 4, Manual(dp=2, ep=2, tp=2), {}),
    ("mixtral", 4, Manual(dp=2, ep=4, tp=2, etp=1, zero=1, **SEQUENCES), ROUTER_LOSS),
    ("mixtral", 1, Manual(cp=2, ep=2), ROUTER_LOSS),
    ("mixtral", 2, Manual(dp=2, cp=2, ep=4, zero=1), {}),
    ("mixtral", 4, Manual(pp=2, dp=2, ep=2), {"num_hidden_layers": 2}),
    ("qwen3_moe", 4, Manual(dp=2, ep=2, zero=3), ROUTER_LOSS),
    ("qwen3_moe", 4, Manual(dp=4, ep=4), ROUTER_LOSS),
    ("qwen3_moe", 4, Manual(tp=2, ep=2, etp=1), {}),
    ("qwen3_moe", 1, Manual(cp=2, ep=2, zero=1), ROUTER_LOSS),
    ("qwen3_moe", 4, Manual(pp=2, dp=2, ep=2, zero=1), {"num_hidden_layers": 2}),
    ("gpt_oss", 4, Manual(dp=2, ep=2), {}),
    ("gpt_oss", 4, Manual(dp=4, ep=2, zero=3), {}),
    ("gpt_oss", 4, Manual(dp=2, ep=2, tp=2, zero=1), {}),
    ("gpt_oss", 4, Manual(tp=2, ep=2, etp=1), {}),
    ("deepseek_v3", 4, Manual(dp=2, ep=2, zero=1), {}),
    ("deepseek_v3", 4, Manual(dp=4, ep=4, zero=3), {}),
    ("deepseek_v3", 4, Manual(dp=2, ep=2, tp=2, zero=1), {}),
    ("deepseek_v3", 1, Manual(cp=2, ep=2), {}),
    ("deepseek_v3", 4, Manual(pp=2, dp=2, ep=2), {"num_hidden_layers": 2}),
]


@nightly
@pytest.mark.parametrize(
    ("family", "n_rows", "manual", "changes"),
    CASES,
    ids=[f"{c[0]}-{k}" for k, c in enumerate(CASES)],
)
def test_a_step_is_that_of_one_process(
    family: str, n_rows: int, manual: Manual, changes: dict[str, Any]
) -> None:
    """Each mixture has one exchange there and one back, both ways, and keeps its experts apart."""
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (n_rows, N_TOKENS))
    batch = {"input_ids": ids, "labels": ids.clone()}
    model = moe_model(family, **changes)
    report = autopar.verify(
        model, machine((1, manual.n_ranks)), batch, precision="fp64", microbatches=1, manual=manual
    )
    assert report.ok and report.tolerance <= 1e-10, report.text()
    plan = report.plan
    for stage in plan.stages:
        assert math.prod(stage.axes[name] for name in manual.expert_axes) == manual.ep
    matrices = [name for name in plan.uses if name.endswith("experts.gate_up_proj")]
    axes = list(plan.stages[0].axes)
    for name in matrices:
        for use in plan.uses[name].values():
            assert {axes[k] for k, p in enumerate(use) if p == "S(0)"} >= {*manual.expert_axes}
    counts = Counter[str]()
    for call in plan.collectives():
        if "autopar.expert_mlp" in call.tensor:
            counts[f"{call.kind} {call.phase}"] += call.count
    n, exchanges = len(matrices), manual.expert_axes != ("tp",)
    of_rows = {"all_gather forward": n, "all_to_all forward": 2 * n, "all_to_all backward": 2 * n}
    assert counts == (of_rows if exchanges else {})


@pytest.mark.parametrize(
    ("n_experts", "message"),
    [
        (3, r"Manual\(ep=2\): 3 experts do not divide(.|\n)*hint: make ep a divisor"),
        (0, r"Manual\(ep=2\): Linear has no experts(.|\n)*hint: leave ep out"),
    ],
)
def test_experts_that_ranks_cannot_divide_are_refused(n_experts: int, message: str) -> None:
    model: nn.Module = nn.Linear(4, 4)
    batch: Any = (torch.randn(4, 4),)
    loss_fn: Any = lambda outputs, _: outputs.sum()  # noqa: E731
    if n_experts:
        model = moe_model("mixtral", num_local_experts=n_experts)
        ids = torch.zeros(4, N_TOKENS, dtype=torch.int64)
        batch, loss_fn = {"input_ids": ids, "labels": ids}, None
    recipe = Manual(dp=2, ep=2)
    with pytest.raises(OptionError, match=message):
        autopar.plan(model, machine((1, 2)), batch, manual=recipe, loss_fn=loss_fn)
