"""The planner finds sequence parallelism where the batch cannot be sharded: one sequence, 8 A100.

An all_reduce becomes a reduce_scatter and an all_gather of the same bytes (Korthikanti et al.,
arXiv:2205.05198). With `forbid="sequence"` there are Megatron's four all_reduces per layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar.cost.laws import CostModel
from autopar.mesh import Device
from autopar.passes.analysis import Analysis
from autopar.passes.intra import Constraints, PlacementRequest, choose
from autopar.placement import S, Spec
from autopar.planning import Plan
from autopar.program.lines import Strategy
from tests.helpers.captures import captured
from tests.helpers.harness import (
    Step,
    abstract_cost,
    generated_code,
    random_tokens,
    thread_step,
    tiny_gpt2,
    tiny_llama,
)
from tests.helpers.nightly import one_in

__all__ = ["generated_code"]

SEQUENCE = 1024


@dataclass(frozen=True)
class Wide:
    """A model of published width, and the number of its layers that are planned."""

    family: str
    width: int
    n_layers: int
    config: Mapping[str, int | float]


GPT2 = Wide("gpt2", 4096, 2, {
    "n_layer": 2, "n_embd": 4096, "n_head": 32, "vocab_size": 50304,
    "bos_token_id": 0, "eos_token_id": 0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
})  # fmt: skip
LLAMA = Wide("llama", 4096, 1, {
    "num_hidden_layers": 1, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
})  # fmt: skip
WIDE = pytest.mark.parametrize("wide", [GPT2, LLAMA], ids=lambda w: w.family)


def planned(wide: Wide, *forbid: str) -> Plan:
    """The plan on eight A100; only `forbid` limits the planner."""
    if (wide.family, forbid) not in _PLANS:
        with torch.device("meta"):
            config = AutoConfig.for_model(wide.family, **wide.config)
            module = AutoModelForCausalLM.from_config(config).bfloat16()
            ids = torch.zeros(1, SEQUENCE, dtype=torch.long)
        _PLANS[wide.family, forbid] = autopar.plan(
            module, autopar.Mesh((1, 8), hardware="a100-80gb"), {"input_ids": ids, "labels": ids},
            forbid=list(forbid), stages=1, mesh_shape="as-given",
        )  # fmt: skip
    return _PLANS[wide.family, forbid]


_PLANS: dict[tuple[str, tuple[str, ...]], Plan] = {}


def calls_on_rows(wide: Wide, plan: Plan) -> Counter[tuple[str, str]]:
    """(kind, phase) of a microbatch's collectives on tensors as large as the residual stream."""
    size_bytes = SEQUENCE * wide.width * torch.bfloat16.itemsize
    calls: Counter[tuple[str, str]] = Counter()
    for call in plan.collectives():
        if call.size_bytes == size_bytes and call.phase in ("forward", "backward"):
            calls[call.kind, call.phase] += call.count
    return calls


@one_in(2)
@WIDE
def test_activations_are_scattered_and_gathered(wide: Wide) -> None:
    """Each layer has two reduce_scatters and two all_gathers, in forward and in backward."""
    calls = calls_on_rows(wide, planned(wide))
    assert {kind for kind, _ in calls} == {"reduce_scatter", "all_gather"}
    assert min(calls.values()) >= 2 * wide.n_layers
    assert len(calls) == 4


@WIDE
def test_without_sequence_there_are_four_all_reduces_per_layer(wide: Wide) -> None:
    """One more pair belongs to the embedding and the head."""
    plan = planned(wide, "sequence")
    calls = calls_on_rows(wide, plan)
    expected = 2 * wide.n_layers + 1
    assert calls["all_reduce", "forward"] == calls["all_reduce", "backward"] == expected
    assert not any(kind == "reduce_scatter" for kind, _ in calls)
    assert planned(wide).predicted.step_time_s < plan.predicted.step_time_s


@pytest.mark.parametrize("function", ["vocab_parallel_embedding", "vocab_parallel_cross_entropy"])
def test_lowered_operators_are_chosen(function: str) -> None:
    """A vocabulary of 50304 on eight A100: neither the table nor the logits are gathered."""
    (source,) = planned(GPT2).code().values()
    assert f" = {function}.forward(" in source


@dataclass(frozen=True)
class Small:
    """The fastest plan of a small model on one sequence; bytes cost as much to touch as to send."""

    analysis: Analysis
    cost: CostModel
    strategy: Strategy
    batch: Mapping[str, Tensor]

    @staticmethod
    def of(make: Callable[[], nn.Module], *forbid: str) -> Small:
        batch = {name: ids[1:2] for name, ids in random_tokens(0).items()}
        analysis = Analysis.of(captured(make(), batch, precision="fp64"))
        cost = abstract_cost((4,), Device(1.0, 1.0, 1e15))
        limits = Constraints(frozenset(forbid))
        return Small(
            analysis,
            cost,
            choose(analysis, PlacementRequest(cost, 1, limits), "adamw", None).strategy,
            batch,
        )

    def step(self) -> Step:
        return thread_step(self.analysis, self.cost, self.strategy, self.batch, 1)


@one_in(2)
@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama])
def test_rows_of_a_small_sequence(make: Callable[[], nn.Module]) -> None:
    """Rows of small models are sharded too, and steps compute what one process computes."""
    small = Small.of(make)
    norms = {
        small.strategy.operators[o.name].inputs[0]
        for o in small.analysis.operators
        if str(o.call.op) in ("aten.layer_norm.default", "aten.rsqrt.default")
    }
    assert norms == {Spec((S(1),))}
    step = small.step()
    assert step.wrong == {}
    assert not any(c.kind == "all_reduce" and c.size_bytes >= 8 * 4 * 16 for c in step.calls)


class Tied(nn.Module):
    """One table embeds words and scores them; it has far more words than features."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.between = nn.Embedding(256, 8), nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        scores = F.linear(self.between(self.words(input_ids)), self.words.weight)
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def test_rows_of_a_small_vocabulary() -> None:
    """Both vocabulary-parallel operators are chosen and right."""
    small = Small.of(Tied)
    lowered = {o.lowered.function for o in small.strategy.operators.values() if o.lowered}
    assert lowered == {"vocab_parallel_embedding", "vocab_parallel_cross_entropy"}
    assert small.step().wrong == {}
