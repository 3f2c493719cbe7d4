"""Repeated blocks and layers: which are found, what represents them, where stages may begin."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from torch import Tensor, nn

from autopar.passes.analysis import KEPT, Analysis, cut, find_runs, fold
from autopar.passes.inter import Layers, balance, find_layers, operator_flops
from tests.helpers.captures import captured
from tests.helpers.harness import (
    MODELS,
    WIDTH,
    language_model,
    model_case,
    random_rows,
    tiny_gpt2,
    tiny_llama,
)
from tests.helpers.models.blocks import N_BLOCKS, Block, Chain, SharedBlock, TwoStacks


def analysis_of(model: nn.Module) -> Analysis:
    return Analysis.of(captured(model, random_rows(0, "x"), precision="fp64"))


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama])
def test_transformer_blocks_are_one_run(make: Callable[[int], nn.Module]) -> None:
    analysis = language_model(make, N_BLOCKS)
    (run,) = find_runs(analysis)
    (shorter,) = find_runs(language_model(make, N_BLOCKS - 1))
    assert (run.count, shorter.count) == (N_BLOCKS, N_BLOCKS - 1)
    assert shorter.period == run.period
    folded = fold(analysis, [run])
    assert len(folded.kept) == len(analysis.operators) - (N_BLOCKS - KEPT) * run.period


def test_what_stands_for_an_operator_is_like_it() -> None:
    for model in (Chain([Block(WIDTH) for _ in range(N_BLOCKS)]), TwoStacks(), SharedBlock()):
        analysis = analysis_of(model)
        folded = fold(analysis, find_runs(analysis))
        assert len(folded.kept) < len(analysis.operators)
        types = analysis.types.tensors
        for i, f in enumerate(folded.stands_for):
            whole, kept = analysis.operators[i], folded.analysis.operators[f]
            assert whole.call.op == kept.call.op
            assert [types[n] for n in whole.inputs] == [types[n] for n in kept.inputs]
            if i == folded.kept[f]:
                assert whole.outputs == kept.outputs
        # The folded program reads only what it makes or is given.
        made = {n.name for n in analysis.program.graph.nodes if n.op == "placeholder"}
        for operator in folded.analysis.operators:
            assert made.issuperset(operator.inputs)
            made |= set(operator.outputs)
        assert folded.analysis.program.loss in made


def test_parameters_of_dropped_blocks_go_with_them() -> None:
    chain = analysis_of(Chain([Block(WIDTH) for _ in range(N_BLOCKS)]))
    (run,) = find_runs(chain)  # without the first block, whose input carries no gradient
    kept = fold(chain, [run]).analysis.program.parameters
    assert run.count == N_BLOCKS - 1
    assert len(kept) == 4 * (1 + KEPT)
    repeated = analysis_of(SharedBlock())
    assert len(fold(repeated, find_runs(repeated)).analysis.program.parameters) == 4


def test_two_stacks_are_two_runs() -> None:
    analysis = analysis_of(TwoStacks())
    encoder, decoder = find_runs(analysis)
    assert encoder.end <= decoder.start
    assert encoder.count > KEPT and decoder.count > KEPT


@pytest.mark.parametrize(
    "blocks",
    [
        [Block(WIDTH), Block(WIDTH, "gelu"), Block(WIDTH), Block(WIDTH, "gelu")],
        [Block(WIDTH) for _ in range(KEPT)],
        [Block(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), Block(2 * WIDTH)],
    ],
    ids=["other operators", "too few", "other sizes"],
)
def test_unlike_blocks_are_no_run(blocks: list[nn.Module]) -> None:
    analysis = analysis_of(Chain(blocks))
    assert find_runs(analysis) == ()
    folded = fold(analysis, ())
    assert folded.stands_for == tuple(range(len(analysis.operators)))
    assert folded.analysis.operators == analysis.operators


def test_a_block_that_reads_otherwise_ends_the_run() -> None:
    """Seven equal blocks, but the fourth also adds the first one's result."""

    class Skip(Chain):
        def forward(self, x: Tensor) -> Tensor:
            made = [x]
            for k, block in enumerate(self.blocks):
                made.append(block(made[-1]) if k != 3 else made[1] + block(made[-1]))
            return made[-1].pow(2).mean()

    analysis = analysis_of(Skip([Block(WIDTH) for _ in range(7)]))
    for run in find_runs(analysis):
        for i in range(run.start, run.end - run.period):
            a, b = analysis.operators[i], analysis.operators[i + run.period]
            assert a.call.op == b.call.op and len(a.inputs) == len(b.inputs)
    assert all(run.count < 7 for run in find_runs(analysis))


def layers_of(analysis: Analysis, n_least: int = 2, n_most: int = 48) -> Layers:
    return find_layers(analysis, find_runs(analysis), n_least, n_most)


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama])
def test_layers_end_where_the_residual_stream_alone_crosses(
    make: Callable[[int], nn.Module],
) -> None:
    """Layers are the attention and the MLP of every block, and the head."""
    analysis = language_model(make, N_BLOCKS)
    layers = layers_of(analysis)
    assert layers.n_layers == 2 * N_BLOCKS + 1
    stages = cut(analysis.program, layers.ends)
    assert all(len(stage.received) == 1 for stage in stages[1:])
    assert all(flops > 0 for flops in layers.flops)
    assert math.fsum(layers.flops) == pytest.approx(math.fsum(operator_flops(analysis)))
    # Equal blocks have equal layers.
    assert len({(a, b) for a, b in zip(layers.flops[:-1:2], layers.flops[1::2], strict=True)}) == 1


def test_fewer_layers_keep_the_boundaries_between_blocks() -> None:
    analysis = language_model(tiny_gpt2, N_BLOCKS)
    every, blocks = layers_of(analysis), layers_of(analysis, n_most=N_BLOCKS + 1)
    assert blocks.n_layers == N_BLOCKS + 1
    assert set(blocks.ends) < set(every.ends)
    keys = [analysis.program.keys[o.name] for o in analysis.operators]
    for end in blocks.ends[:-2]:
        before, after = keys[end - 1], keys[end]
        assert before.split("/")[0].split(".")[:3] != after.split("/")[0].split(".")[:3]
    assert layers_of(analysis, n_most=3).n_layers <= 3


@pytest.mark.parametrize("model", MODELS)
def test_every_layer_may_be_a_stage(model: str) -> None:
    analysis = model_case(model).analysis
    for n_least in (2, 4, 6):
        layers = layers_of(analysis, n_least)
        assert layers.n_layers >= n_least
        cut(analysis.program, layers.ends)  # the loss is on the last stage, or this raises


def test_balanced_parts_equal_every_partition_counted_out() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        weights = (rng.integers(0, 6, int(rng.integers(1, 9))) * 1.0).tolist()
        n_parts = int(rng.integers(1, len(weights) + 1))
        last = balance(weights, n_parts)
        assert last[-1] == len(weights) - 1 and len(last) == n_parts

        def heaviest(inner: Sequence[int], weights: list[float] = weights) -> float:
            bounds = (0, *inner, len(weights))
            return max(sum(weights[a:b]) for a, b in itertools.pairwise(bounds))

        every = itertools.combinations(range(1, len(weights)), n_parts - 1)
        assert heaviest([k + 1 for k in last[:-1]]) == min(map(heaviest, every))
