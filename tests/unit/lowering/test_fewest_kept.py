"""Bytes that "selective" keeps, beside the fewest from which the rest can be made again."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar import Manual, Mesh, NotSupportedError
from tests.helpers.fewest_kept import Kept, KeptValues
from tests.helpers.nightly import nightly
from tests.helpers.plans import bound_of
from tests.parity.zoo import FAMILIES

LAYOUTS = {
    "one": None,
    "tp": Manual(tp=2),
    "sp": Manual(tp=2, sp=True),
    "zero3": Manual(dp=2, zero=3),
}
CLOSE = 1.02
# With sequence parallelism BART keeps both a norm's shard, for the residual, and it gathered.
LESS_CLOSE = {("bart", "sp"): 1.08}
MIB = 2**20
BY_DAY = [("gpt2", "tp"), ("llama", "sp")]
EVERY = [(family, layout) for family in FAMILIES for layout in LAYOUTS]


def segments_of(family: str, layout: str) -> list[Kept]:
    entry, manual = FAMILIES[family], LAYOUTS[layout]
    options = {"recompute": "selective", "microbatches": entry.microbatches, **entry.options}
    mesh = Mesh((1, 1 if manual is None else 2))
    plan = autopar.plan(entry.case.model(), mesh, entry.case.batch(0), manual=manual, **options)
    stages = (replace(stage, trains=True) for stage in bound_of(plan).pipeline.stages)
    return [segment for stage in stages for segment in KeptValues(stage)]


@pytest.mark.parametrize(
    ("family", "layout"), [*BY_DAY, *(pytest.param(*c, marks=nightly) for c in EVERY)]
)
def test_selective_keeps_the_fewest_bytes(family: str, layout: str) -> None:
    try:
        segments = segments_of(family, layout)
    except NotSupportedError as error:
        assert "has no repeated blocks" in str(error)  # noqa: PT017
        return
    for segment in segments:
        assert segment.fewest <= segment.now
        assert segment.now <= LESS_CLOSE.get((family, layout), CLOSE) * segment.fewest


@lru_cache
def of_a_block(kind: str) -> Kept:
    """A middle block of width 256, 4 sequences of 256 tokens, float32."""
    torch.manual_seed(0)
    sizes = (
        {"n_embd": 256, "n_layer": 3, "n_head": 4, "n_positions": 256}
        if kind == "gpt2"
        else {
            "hidden_size": 256,
            "num_hidden_layers": 3,
            "intermediate_size": 688,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
        }
    )
    config = AutoConfig.for_model(kind, vocab_size=512, bos_token_id=0, eos_token_id=0, **sizes)
    ids = torch.zeros(4, 256, dtype=torch.int64)
    plan = autopar.plan(
        AutoModelForCausalLM.from_config(config), Mesh((1, 1)),
        {"input_ids": ids, "labels": ids}, recompute="selective",
        microbatches=1, forbid=["pipeline"],
    )  # fmt: skip
    (stage,) = bound_of(plan).pipeline.stages
    return list(KeptValues(replace(stage, trains=True)))[1]


@pytest.mark.parametrize(("kind", "most_mib"), [("gpt2", 15), ("llama", 12)])
def test_a_block_keeps_half_of_what_its_operators_would(kind: str, most_mib: float) -> None:
    block = of_a_block(kind)
    assert block.now <= most_mib * MIB
    assert block.now < 0.6 * block.without
