"""Memory of compiled regions: bytes that PyTorch allocates in a step, against predictions.

Compiled code allocates past the dispatcher, so the profiler counts, not `LiveBytes`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar import Mesh
from tests.helpers.machines import one_node
from tests.helpers.nightly import nightly
from tests.helpers.plans import bound_of

# What the compiler makes early differs from run to run: a Llama measured 76, 77 and 81 MiB.
CLOSE = {"none": 0.03, "selective": 0.05}
N_LAYERS, WIDTH, ROWS, TOKENS, WORDS = 6, 256, 4, 256, 512
SIZES = {
    "gpt2": {"n_embd": WIDTH, "n_layer": N_LAYERS, "n_head": 4, "n_positions": TOKENS},
    "llama": {
        "hidden_size": WIDTH, "num_hidden_layers": N_LAYERS, "intermediate_size": 688,
        "num_attention_heads": 4, "num_key_value_heads": 4,
    },
}  # fmt: skip


def model(kind: str) -> torch.nn.Module:
    """Its activations are most of its memory."""
    torch.manual_seed(0)
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if kind == "gpt2" else {}
    config = AutoConfig.for_model(
        kind, vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **SIZES[kind], **drop
    )
    found: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return found


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def peak_above_start(step: Callable[[], object], folder: Path) -> int:
    """Bytes that are allocated at most during a step, above those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    trace = folder / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    found = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    totals = [int(event["args"]["Total Allocated"]) for event in found]
    return max(totals) - (totals[0] - int(found[0]["args"]["Bytes"]))


def predicted_above_start(plan: autopar.Plan) -> float:
    """The predicted peak without weights, moments of AdamW, and the batch."""
    (stage,) = bound_of(plan).pipeline.stages
    weights = sum(p.stored.size_bytes for p in stage.parameters)
    return plan.predicted.peak_bytes - 3 * weights - sum(t.nbytes for t in batch().values())


@nightly
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # raised in inductor
@pytest.mark.parametrize("recompute", CLOSE)
@pytest.mark.parametrize("kind", SIZES)
def test_peak_of_compiled_regions(kind: str, recompute: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    tokens = batch()
    pm = autopar.parallelize(
        model(kind), Mesh((1, 1)), tokens, compile="regions", recompute=recompute, microbatches=1
    )

    def step() -> None:
        pm.zero_grad()
        pm.step(input_ids=tokens["input_ids"], labels=tokens["labels"])

    step()
    step()
    pm.zero_grad()
    measured = peak_above_start(step, tmp_path)
    assert predicted_above_start(pm.plan) == pytest.approx(measured, rel=CLOSE[recompute])


def test_regions_hold_their_arguments_and_no_fused_values() -> None:
    """A chain of pointwise operators: without regions each result is there while the next is made;
    in one region what it is given stays, and nothing between is made."""

    class Chain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).sin().mul(2.0).add(1.0).mul(0.5).mean()

    x = torch.zeros(4096, WIDTH)
    mesh = one_node(1)
    plans = {
        how: autopar.plan(Chain(), mesh, {"x": x}, compile=how, microbatches=1)
        for how in ("none", "regions")
    }
    weights = sum(
        p.stored.size_bytes for p in bound_of(plans["none"]).pipeline.stages[0].parameters
    )
    above = {how: plan.predicted.peak_bytes - 3 * weights for how, plan in plans.items()}
    # x, the result of `linear`; then x, that result, its gradient and one between.
    assert round(above["regions"] / x.nbytes, 1) <= 3.1
    assert above["none"] > above["regions"] + 0.9 * x.nbytes
