"""What dropout in attention costs a plan of layers of GPT-2, on a device as it is sold."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar import Mesh, Plan
from autopar.program.lines import CallLine


def planned(p: float, attention: str = "sdpa") -> Plan:
    config = AutoConfig.for_model(
        "gpt2",
        n_layer=1,
        vocab_size=1024,
        attn_pdrop=p,
        use_cache=False,
        attn_implementation=attention,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = torch.zeros(4, 1024, dtype=torch.int64)
    return autopar.plan(
        model, Mesh((1, 1), hardware="a100-40gb"), {"input_ids": ids, "labels": ids},
        microbatches=1, recompute="none",
    )  # fmt: skip


def test_it_costs_little() -> None:
    """Its parts, which keep the weights, cost at least two fifths more."""
    without, fused = planned(0.0).predicted, planned(0.1).predicted
    assert fused.step_time_s == pytest.approx(without.step_time_s, rel=0.02)
    assert fused.peak_bytes == pytest.approx(without.peak_bytes, rel=0.03)
    parts = planned(0.1, "eager").predicted
    assert parts.step_time_s > 1.4 * fused.step_time_s
    assert parts.peak_bytes > 1.4 * fused.peak_bytes


def test_its_lines_are_attention() -> None:
    plan = planned(0.1)
    assert plan.bound is not None
    (stage,) = plan.bound.pipeline.stages
    lines = [line for line in stage.body if isinstance(line, CallLine) and line.is_attention]
    assert [line.target for line in lines] == ["autopar.attention_dropout.default"]
