"""Captured programs against eager: whole models, losses and gradients."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar.capture import capture
from autopar.program import Program
from tests.helpers.capture_harness import assert_same, eager, loss_of, run

VOCABULARY = 61


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2,
            n_embd=32,
            n_head=4,
            vocab_size=VOCABULARY,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            loss_type="ForCausalLMLoss",
        )
    )


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
        )
    )


class BertBlock(nn.Module):
    """Fused QKV with chunk, post-norm, erf gelu, tied embedding, cross-entropy."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(VOCABULARY, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.norm2 = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        b, s, w = x.shape
        q, k, v = (
            t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v)
        x = self.norm1(x + self.out(attended.transpose(1, 2).contiguous().view(b, s, w)))
        x = self.norm2(x + self.mlp(x))
        logits = self.head(x)
        return {"logits": logits, "loss": F.cross_entropy(logits.transpose(1, 2), labels)}


class MlpWithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.layers(x), y)


def token_batch(names: tuple[str, str]) -> dict[str, torch.Tensor]:
    """Tokens and labels; many labels are ignored, unevenly over rows."""
    ids = torch.randint(0, VOCABULARY, (4, 8))
    labels = torch.randint(0, VOCABULARY, (4, 8))
    labels[0, 1:] = -100
    labels[2, 5:] = -100
    return dict(zip(names, (ids, labels), strict=True))


def mlp_batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(6, 8), "y": torch.randn(6, 4)}


CASES = {
    "gpt2": (gpt2, lambda: token_batch(("input_ids", "labels"))),
    "llama": (llama, lambda: token_batch(("input_ids", "labels"))),
    "bert": (BertBlock, lambda: token_batch(("ids", "labels"))),
    "mlp": (MlpWithLoss, mlp_batch),
}


@cache
def captured(case: str, precision: str = "model") -> tuple[nn.Module, dict[str, Any], Program]:
    """(model, batch, captured program) of a case."""
    torch.manual_seed(0)
    make, make_batch = CASES[case]
    model, batch = make(), make_batch()
    return model, batch, capture(model, batch, precision=precision)


@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_outputs_equal_eager(case: str) -> None:
    model, batch, program = captured(case)
    loss, outputs, gradients = run(program, model, batch)
    want_loss, want_outputs, want_gradients = eager(model, batch)
    assert_same((loss, gradients), (want_loss, want_gradients), 1e-6)
    assert type(outputs) is type(want_outputs)
    if case != "mlp":
        torch.testing.assert_close(outputs["logits"], want_outputs["logits"], rtol=0, atol=1e-6)
        assert loss_of(outputs).detach() == loss


def as_float64(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


@pytest.mark.parametrize("case", CASES)
def test_fp64_program_is_float64_throughout_and_exact(case: str) -> None:
    model, batch, program = captured(case, "fp64")
    prologue = list(program.prologue.graph.graph.nodes) if program.prologue else []
    for node in [*program.graph.nodes, *prologue]:
        values = node.meta.get("val")
        for value in values if isinstance(values, (list, tuple)) else [values]:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                assert value.dtype == torch.float64, node.name
    constants = [compute() for compute in program.constants.values()]
    assert all(c.dtype == torch.float64 for c in constants if c.is_floating_point())
    model, batch = copy.deepcopy(model).double(), as_float64(batch)
    loss, _, gradients = run(program, model, batch)
    assert loss.dtype == torch.float64
    want_loss, _, want_gradients = eager(model, batch)
    # transformers casts logits, norms or rotary tables to float32 even in a float64 model.
    tolerance = 1e-10 if case in ("bert", "mlp") else 2e-6
    assert_same((loss, gradients), (want_loss, want_gradients), tolerance)


@pytest.mark.parametrize("case", CASES)
def test_fp64_and_model_precision_trace_the_same_operators(case: str) -> None:
    low, high = (captured(case, precision)[2] for precision in ("model", "fp64"))
    assert list(low.keys.values()) == list(high.keys.values())


@pytest.mark.parametrize("case", CASES)
def test_capture_is_stable(case: str) -> None:
    model, batch, first = captured(case)
    second = capture(copy.deepcopy(model), batch)
    assert first.hash() == second.hash()
    assert dict(first.keys) == dict(second.keys)
    assert len(set(first.keys.values())) == len(first.keys)
    assert all(name in first.sources for name in first.keys)


def test_a_model_on_meta_captures_the_same_program() -> None:
    batch = token_batch(("input_ids", "labels"))
    with torch.device("meta"):
        meta = llama()
    fake_batch = {k: v.to("meta") for k, v in batch.items()}
    program, real = capture(meta, fake_batch), capture(llama(), batch)
    assert program.hash() == real.hash()
    for name, compute in program.constants.items():  # rotary tables as the model initialises them
        torch.testing.assert_close(compute(), real.constants[name](), rtol=0, atol=0)


def test_an_8b_model_on_meta_captures() -> None:
    """8e9 parameters in few layers, because the time of a capture grows with the layers."""
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=8192,
                intermediate_size=65536,
                num_hidden_layers=4,
                num_attention_heads=64,
                num_key_value_heads=8,
                vocab_size=128256,
            )
        )
    assert sum(parameter.numel() for parameter in model.parameters()) > 8e9
    ids = torch.empty(4, 2048, dtype=torch.long, device="meta")
    program = capture(model, {"input_ids": ids, "labels": ids})
    assert len(program.inputs) == 2
    assert sum(1 for _ in program.operators) < 250
    assert not any(str(v) == "meta" for n in program.graph.nodes for v in n.kwargs.values())
