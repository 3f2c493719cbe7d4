"""GPT-175B as it was trained by hand: tensor parallelism inside nodes, stages across.

Narayanan et al. (SC 2021, section 5.1) train GPT-3 (96 layers of width 12288, 96 heads, a batch of
1536 sequences of 2048 tokens) on nodes of eight A100 with tensor parallelism of eight at most and
stages across nodes, without ZeRO. To plan that takes minutes of CPU time (`make nightly`); ordinary
runs plan a few blocks of the same width.
"""

from __future__ import annotations

import autopar
from autopar import Mesh, Plan
from tests.helpers.machines import A100
from tests.helpers.models.wide_models import meta_tokens, wide_gpt2
from tests.helpers.nightly import nightly

WIDTH, LENGTH, N_WORDS = 12288, 2048, 51200


def planned(n_layers: int, n_nodes: int, n_rows: int, microbatches: int | str = "auto") -> Plan:
    return autopar.plan(
        wide_gpt2(n_layers, WIDTH, LENGTH, N_WORDS), Mesh((n_nodes, 8), hardware=A100),
        meta_tokens(n_rows, LENGTH), forbid=["zero1", "zero2", "zero3"], microbatches=microbatches,
    )  # fmt: skip


def assert_tensors_inside_nodes(plan: Plan) -> None:
    """Collectives of activations stay inside a node; a stage has whole nodes or a part of one."""
    for stage in plan.stages:
        assert 1 < stage.axes["tp"] <= 8, stage.axes
        assert 8 % stage.axes["tp"] == 0
        assert len(stage.ranks) % 8 == 0 or 8 % len(stage.ranks) == 0
    for call in plan.collectives():
        if call.phase in ("forward", "backward") and call.size_bytes > 2**20:
            assert call.axis == "tp", call


def test_a_few_blocks_are_split_inside_nodes() -> None:
    assert_tensors_inside_nodes(planned(4, 2, 48, 4))


@nightly
def test_stages_across_nodes() -> None:
    plan = planned(96, 48, 1536)
    assert_tensors_inside_nodes(plan)
    assert len(plan.stages) > 1
    assert plan.predicted.peak_bytes <= 80e9
