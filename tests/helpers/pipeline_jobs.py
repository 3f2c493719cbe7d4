"""Cells of the parity table with stages on four ranks: cut by module names, or by a recipe."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, T5ForConditionalGeneration

from autopar import Manual
from tests.helpers.jobs import (
    HEADS,
    VOCABULARY,
    WIDTH,
    Batch,
    Case,
    Mlp,
    gpt2,
    llama,
    machine,
    rows,
    squares,
    tokens,
)

# Eight microbatches of six rows: they divide over two ranks and over three.
ROWS = 48
DECODER_SEQUENCE = 6  # unlike the encoder's, so that the two are never mixed up


def t5() -> nn.Module:
    """Encoder and decoder: all decoder layers read the encoder's output; three tied weights."""
    config = AutoConfig.for_model(
        "t5", num_layers=2, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=2 * WIDTH, num_heads=HEADS,
        vocab_size=VOCABULARY, relative_attention_num_buckets=8,
        relative_attention_max_distance=16, dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def sequences(seed: int) -> Batch:
    """What a translation model is given; labels are ignored unevenly."""
    batch = tokens(seed, ROWS)
    generator = torch.Generator().manual_seed(100 + seed)
    decoder = torch.randint(0, VOCABULARY, (ROWS, DECODER_SEQUENCE), generator=generator)
    labels = batch["labels"][:, :DECODER_SEQUENCE].contiguous()
    return {"input_ids": batch["input_ids"], "decoder_input_ids": decoder, "labels": labels}


CASES: dict[str, Case] = {
    "mlp": Case(partial(Mlp, n_layers=4), lambda seed: rows(seed, "x", n_rows=ROWS), squares),
    "gpt2": Case(gpt2, lambda seed: tokens(seed, ROWS)),
    "llama": Case(llama, lambda seed: tokens(seed, ROWS)),
    "t5": Case(t5, sequences),
}

# Modules of four stages, in running order; two stages hold two of these parts each.
QUARTERS = {
    "mlp": ("net.0 net.1", "net.2 net.3", "net.4 net.5", "net.6 net.7"),
    "gpt2": (
        "transformer.wte transformer.wpe",
        "transformer.h.0",
        "transformer.h.1",
        "transformer.ln_f lm_head",
    ),
    "llama": ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm lm_head"),
    "t5": (
        "encoder.embed_tokens encoder.block.0",
        "encoder.block.1 encoder.final_layer_norm",
        "decoder.embed_tokens decoder.block.0",
        "decoder.block.1 decoder.final_layer_norm lm_head",
    ),
}


# A weight of the second half, cut in use otherwise than a search would.
PINNED = {
    "mlp": ("net.4.weight", "->S(1)@device"),
    "gpt2": ("transformer.h.1.mlp.c_fc.weight", "->S(1)@device"),
    "llama": ("model.layers.1.mlp.up_proj.weight", "->S(0)@device"),
    "t5": ("decoder.block.0.layer.2.DenseReluDense.wi.weight", "->S(0)@device"),
}


@dataclass(frozen=True)
class Layout:
    """Where stages stand: given submeshes of the mesh, or a recipe."""

    mesh: tuple[int, int]
    submeshes: tuple[tuple[int, int], ...] = ()
    mesh_shape: str = "auto"
    manual: Manual | None = None
    forbid: str | None = None
    is_pinned: bool = False

    def options(self, model: str) -> dict[str, Any]:
        if self.manual is not None:
            return {"manual": self.manual}
        parts = [part.split() for part in QUARTERS[model]]
        if len(self.submeshes) == 2:
            parts = [parts[0] + parts[1], parts[2] + parts[3]]
        stages = list(zip(parts, self.submeshes, strict=True))
        options: dict[str, Any] = {"stages": stages, "mesh_shape": self.mesh_shape}
        if self.forbid:
            options["forbid"] = [self.forbid]
        if self.is_pinned:
            options["force"] = dict([PINNED[model]])
        return options


# Stages of which each searches its own plan.
SEARCHED: dict[str, Layout] = {
    "2 x (1,2)": Layout((2, 2), ((1, 2), (1, 2))),
    "4 x (1,1)": Layout((1, 4), ((1, 1),) * 4),
    "(1,1) + (1,3)": Layout((1, 4), ((1, 1), (1, 3))),
    "2 x (2,1) as given": Layout((4, 1), ((2, 1), (2, 1)), "as-given"),
}
# Plans that no search on this machine would choose: a search splits rows where it can.
CHOSEN: dict[str, Layout] = {
    "no data": Layout((2, 2), ((1, 2), (1, 2)), "as-given", forbid="data"),
    "pinned": Layout((2, 2), ((1, 2), (1, 2)), "as-given", is_pinned=True),
    "pp2 tp2": Layout((2, 2), manual=Manual(pp=2, tp=2)),
    "pp2 tp2 sequence": Layout((2, 2), manual=Manual(pp=2, tp=2, sp=True)),
    "pp2 dp2": Layout((2, 2), manual=Manual(pp=2, dp=2)),
    "pp2 dp2 zero-1": Layout((2, 2), manual=Manual(pp=2, dp=2, zero=1)),
    "pp2 dp2 zero-2": Layout((2, 2), manual=Manual(pp=2, dp=2, zero=2)),
    "pp2 dp2 zero-3": Layout((2, 2), manual=Manual(pp=2, dp=2, zero=3)),
    "pp4": Layout((1, 4), manual=Manual(pp=4)),
}
# Schedules of equal stages, and the recipes that they are for.
ORDERED: dict[str, tuple[str, Layout]] = {
    "pp2 interleaved": ("interleaved", Layout((1, 2), manual=Manual(pp=2, interleave=2))),
    "pp2 dp2 zero-1 interleaved": (
        "interleaved", Layout((2, 2), manual=Manual(pp=2, dp=2, zero=1, interleave=2)),
    ),
    "pp2 tp2 interleaved full": (
        "interleaved", Layout((2, 2), manual=Manual(pp=2, tp=2, interleave=2, recompute="full")),
    ),
    "pp4 zero-bubble": ("zero-bubble", Layout((1, 4), manual=Manual(pp=4))),
    "pp2 dp2 zero-2 zero-bubble": (
        "zero-bubble", Layout((2, 2), manual=Manual(pp=2, dp=2, zero=2)),
    ),
    "pp2 zero-bubble-v selective": (
        "zero-bubble-v", Layout((1, 2), manual=Manual(pp=2, recompute="selective")),
    ),
    "pp2 tp2 zero-bubble-v": ("zero-bubble-v", Layout((2, 2), manual=Manual(pp=2, tp=2))),
    "pp2 dp2 zero-3 dualpipe-v": ("dualpipe-v", Layout((2, 2), manual=Manual(pp=2, dp=2, zero=3))),
    "pp2 dualpipe-v": ("dualpipe-v", Layout((1, 2), manual=Manual(pp=2))),
}  # fmt: skip
LAYOUTS = SEARCHED | CHOSEN | {name: layout for name, (_, layout) in ORDERED.items()}


class PipelineCell(NamedTuple):
    """One entry of the parity table of pipelines."""

    model: str
    layout: str
    schedule: str
    microbatches: int

    def __str__(self) -> str:
        return f"{self.model}, {self.layout}, {self.schedule}, {self.microbatches} microbatches"

    @property
    def case(self) -> Case:
        return CASES[self.model]

    @property
    def shape(self) -> tuple[int, ...]:
        return LAYOUTS[self.layout].mesh

    @property
    def n_ranks(self) -> int:
        return machine(self.shape).n_ranks

    def options(self) -> dict[str, Any]:
        return {
            "precision": "fp64",
            "microbatches": self.microbatches,
            "schedule": self.schedule,
            "loss_fn": self.case.loss_fn,
            **LAYOUTS[self.layout].options(self.model),
        }


def pipeline_cells() -> list[PipelineCell]:
    """Every searched layout under both orders and counts; every other one under one of the four."""
    ways = list(itertools.product(("1f1b", "gpipe"), (4, 8)))
    searched = itertools.product(SEARCHED, CASES, ways)
    ordered = itertools.product(ORDERED.items(), CASES)
    others = zip(itertools.product(CHOSEN, CASES), itertools.cycle((*ways, ways[0])), strict=False)
    return [
        *(PipelineCell(model, layout, *way) for layout, model, way in searched),
        *(PipelineCell(model, layout, *way) for (layout, model), way in others),
        *(PipelineCell(model, layout, order, 8) for (layout, (order, _)), model in ordered),
    ]
