"""The transformer by its dims: one layer and one step, against papers' formulas and laws."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.hardware import (
    Profile,
    Software,
    changed,
    doublings,
    flops_per_s,
    load_profile,
)
from autopar.cost.published import read_runs
from autopar.cost.published.fit import log_error
from autopar.cost.published.rows import read_row
from autopar.cost.transformer import (
    Chunk,
    Experts,
    Latent,
    LayerModel,
    Order,
    Recipe,
    StepModel,
    TransformerShape,
    kept_of_layer,
    model_flops_per_token,
)
from autopar.cost.transformer.chunks import bytes_per_logit, chunks_of, parameters_of
from autopar.cost.transformer.memory import KeptBytes, rerun_share
from autopar.cost.transformer.work import Exchange, Kernel

# As arXiv 2205.05198 counts: scores are stored, and dropout keeps its masks.
UNFUSED = Software(fused_attention=False, dropout=True)
H100 = load_profile("h100-sxm")
FREE_LINKS = changed(
    H100,
    "link.intra_node.latency_s=0,link.intra_node.s_per_byte=0,link.inter_node.latency_s=0,"
    "link.inter_node.s_per_byte=0,link.intra_node.in_switch_s_per_byte=0,link.intra_node.chunk_s=0",
)
PURE = changed(FREE_LINKS, "device.peak_bytes_per_s=1e30,device.launch_s=0,device.host_s=0")
SHARDED = st.sampled_from([(1, False), (2, False), (4, False), (8, False),
                           (2, True), (4, True), (8, True)])  # fmt: skip


def gpt(
    layers: int, hidden: int, heads: int, seq: int = 2048, vocab: int = 51200
) -> TransformerShape:
    """A plain GPT, whose head is the embedding."""
    return TransformerShape(
        layers, hidden, heads, heads, hidden // heads, 4 * hidden, seq, vocab, is_gated=False
    )


def llama(layers: int, hidden: int, heads: int, ffn: int, vocab: int = 128256) -> TransformerShape:
    return TransformerShape(
        layers, hidden, heads, 8, hidden // heads, ffn, 8192, vocab, is_gated=True
    )


def step(
    shape: TransformerShape, recipe: Recipe, profile: Profile = H100, **words: Any
) -> StepModel:
    """The model of a step in bfloat16 on nodes of 8."""
    return StepModel.of(shape, recipe, Software(**words), profile, torch.bfloat16, 8)


def deepseek_v3() -> TransformerShape:
    """arXiv 2412.19437, section 4.2."""
    experts = Experts(256, 8, 2048, is_grouped=True, shared_ffn=2048)
    return TransformerShape(
        61, 7168, 128, 128, 128, 18432, 4096, 129280, is_gated=True, experts=experts,
        latent=Latent(1536, 512, 64, 128), dense_layers=3,
    )  # fmt: skip


@st.composite
def paper_layers(draw: st.DrawFn) -> LayerModel:
    """Layers of the papers' model on 1 to 8 ranks; 8 divides the number of heads."""
    heads = 8 * draw(st.integers(1, 12))
    hidden = heads * draw(st.sampled_from([16, 64, 128]))
    shape = gpt(1, hidden, heads, 8 * draw(st.integers(1, 512)))
    tp, sp = draw(SHARDED)
    recipe = Recipe(tp=tp, sp=sp, microbatch_size=draw(st.integers(1, 9)), global_batch=2520)
    return LayerModel(shape, recipe, UNFUSED)


@given(paper_layers())
def test_a_layer_keeps_what_the_paper_says(layer: LayerModel) -> None:
    """Korthikanti et al., arXiv 2205.05198, table 2, for elements of 2 bytes. The table's rows
    are multiplied by t, so that all numbers are integers."""
    shape, recipe, t = layer.shape, layer.recipe, layer.recipe.tp
    s, h, a = shape.seq, shape.hidden, shape.heads
    sb = s * recipe.microbatch_size
    core = 5 * a * s * sb
    inside = 34 * sb * h if recipe.sp or t == 1 else (10 * t + 24) * sb * h
    outside = 2 * sb * h if recipe.sp else 2 * sb * h * t

    def kept(recompute: Any) -> KeptBytes:
        found = kept_of_layer(replace(layer, recipe=replace(recipe, recompute=recompute)))
        return KeptBytes(t * found.kept_bytes, t * found.recomputed_bytes)

    assert kept("none") == KeptBytes(inside + core, 0)
    assert kept("attention-core") == KeptBytes(inside, core)
    assert kept("full") == KeptBytes(outside, inside + core)
    fused = replace(layer, software=Software(dropout=True))
    statistics = 4 * a * sb  # one per row of the scores, in float32
    assert t * kept_of_layer(fused).kept_bytes == inside + statistics


@given(paper_layers(), st.sampled_from(["selective", "attention-core", "norm,activation", "full"]))
def test_recompute_keeps_less_and_full_least(layer: LayerModel, recompute: Any) -> None:
    def kept_bytes(way: Any) -> float:
        recipe = replace(layer.recipe, recompute=way)
        return kept_of_layer(replace(layer, recipe=recipe)).kept_bytes

    assert kept_bytes("full") <= kept_bytes(recompute) < kept_bytes("none")


@pytest.mark.parametrize("is_compiled", [False, True])
def test_selective_recompute_saves_attention_and_every_other_matmul(is_compiled: bool) -> None:
    """torchtitan's `_get_custom_policy` over wq, wk, wv, attention, wo, w1, w3, w2 of a Llama."""
    shape, tokens = llama(1, 4096, 32, 14336), 8192
    layer = LayerModel(
        shape,
        Recipe(recompute="selective"),
        Software(fused_attention=True, fused_kernels=is_compiled),
    )
    q, v, ffn, statistics = 4096, 1024, 14336, 32 * 4 * tokens
    read = 2 * tokens * (4096 + q + v + q + ffn) + statistics  # the layer's input, wq, wv, core, w1
    unread = 2 * tokens * 4096 * (not is_compiled)  # of w2, in the cache of the eager checkpoint
    assert kept_of_layer(layer).kept_bytes == pytest.approx(read + unread)
    again = 2 * tokens * 4096 * (1024 + 4096 + ffn)  # wk, wo, w3
    assert flops_again(layer) == pytest.approx(again)


def test_selective_recompute_of_latent_attention_and_experts() -> None:
    """Of wq_a, wq_b, wkv_a, wkv_b, wo, w1, w3, w2 of a dense layer wq_b, wkv_b, w1, w2 run again;
    of a mixture, the first two and all grouped ones."""
    layer = LayerModel(deepseek_v3(), Recipe(recompute="selective"), Software())
    h, shared, routed = 7168, 2048, 8 * 2048
    attention = 1536 * 128 * 192 + 512 * 128 * 256
    for kind, feed_forward in ((layer.dense, 2 * 18432), (layer, 3 * (shared + routed))):
        expected = 2 * 4096 * (attention + h * feed_forward)
        assert flops_again(kind) == pytest.approx(expected)


def flops_again(layer: LayerModel) -> float:
    """FLOPs of matmuls of a layer that its backward runs again."""
    return sum(
        rerun_share(item, layer) * kernel.flops
        for item in layer.items
        for kernel in item.forward
        if isinstance(kernel, Kernel)
    )


def test_torchs_loss_peaks_where_the_table_says() -> None:
    """Bytes per logit from the forward of a float32 loss of bf16 logits to its backward's end."""
    logits = torch.randn(64, 4096, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(64, dtype=torch.long)
    with torch.profiler.profile(profile_memory=True) as seen:
        torch.nn.functional.cross_entropy((logits * 1).float(), labels).backward()
    events = seen.profiler.kineto_results.events()
    allocated = [e for e in events if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(allocated, key=lambda e: e.start_ns())]
    peak = max(accumulate(sizes)) / logits.numel()
    assert bytes_per_logit(Software(loss="torch"), is_sharded=False) == pytest.approx(
        peak, rel=0.01
    )


def test_reserved_bytes_count_the_block_of_freed_logits() -> None:
    """No float32 tensor of torch's loss fits in the block of bf16 logits. A fused loss has none."""
    shape = llama(1, 4096, 32, 14336)
    for loss, stranded in (("torch", 2 * 8192 * shape.vocab), ("fused", 0)):
        takes = step(shape, Recipe(), loss=loss).footprint(setting="expandable")
        assert takes.reserved_bytes * 0.99 - takes.allocated_bytes == pytest.approx(stranded, abs=1)


def n_parameters(shape: TransformerShape, n_chunks: int = 1) -> float:
    chunks = chunks_of(shape.layers, n_chunks, shape.dense_layers)
    layer = LayerModel(shape, Recipe(), Software())
    return sum(sum(parameters_of(layer, chunk).values()) for chunk in chunks)


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        (gpt(96, 12288, 96), 174.6),
        (gpt(105, 20480, 128), 529.6),  # arXiv 2104.04473, table 1
        (gpt(128, 25600, 160), 1008.0),
        (llama(32, 4096, 32, 14336), 8.03),
        (llama(80, 8192, 64, 28672), 70.6),
        (deepseek_v3(), 671.0),
    ],
    ids=["GPT-3 175B", "530B", "1T", "Llama-3 8B", "Llama-3 70B", "DeepSeek-V3"],
)
def test_parameters_of_known_models(shape: TransformerShape, billions: float) -> None:
    assert n_parameters(shape) / 1e9 == pytest.approx(billions, rel=0.002)


@pytest.mark.parametrize("n_chunks", [1, 4, 61])
def test_parameters_of_chunks_are_those_of_the_model(n_chunks: int) -> None:
    """The dense layers come first."""
    shape = deepseek_v3()
    chunks = chunks_of(shape.layers, n_chunks, shape.dense_layers)
    assert [chunk.n_dense for chunk in chunks[:4]] == {1: [3], 4: [3, 0, 0, 0]}.get(
        n_chunks, [1, 1, 1, 0]
    )
    assert n_parameters(shape, n_chunks) == n_parameters(shape)


@given(st.integers(1, 128), st.integers(1, 100), st.integers(1, 4096), st.integers(1, 200000))
def test_model_flops_are_equation_3(layers: int, heads: int, s: int, vocab: int) -> None:
    """Narayanan et al., arXiv 2104.04473, equation 3, without recompute and with it."""
    h = 64 * heads
    for factor, n_heads, again in ((72, 12, False), (96, 16, True)):
        paper = factor * layers * h**2 * (1 + s / (6 * h) + vocab / (n_heads * layers * h))
        found = model_flops_per_token(gpt(layers, h, heads, s, vocab), counts_recompute=again)
        assert found == pytest.approx(paper, rel=1e-12)


def calls_of(layer: LayerModel) -> tuple[Counter[tuple[str, float]], Counter[tuple[str, float]]]:
    """(kind, bytes) of the collectives of a layer, forward and backward."""

    def counted(steps: str) -> Counter[tuple[str, float]]:
        return Counter(
            (step.kind, step.size_bytes)
            for item in layer.items
            for step in getattr(item, steps)
            if isinstance(step, Exchange)
        )

    return counted("forward"), counted("backward")


@given(paper_layers())
def test_collectives_of_a_layer(layer: LayerModel) -> None:
    """Megatron's f and g around attention and MLP, on all tokens of the residual stream. With
    sequence parallelism each is an all_gather and a reduce_scatter. Backward then gathers the
    matmuls' inputs again, since only shards are kept (arXiv 2205.05198, section 4.2.2)."""
    size = 2.0 * layer.recipe.microbatch_size * layer.shape.seq * layer.shape.hidden
    both = Counter({("all_gather", size): 2, ("reduce_scatter", size): 2})
    expected = Counter({("all_reduce", size): 2}), Counter({("all_reduce", size): 2})
    if layer.recipe.tp == 1:
        expected = Counter(), Counter()
    elif layer.recipe.sp:
        expected = both, both + Counter({("all_gather", size): 2})
    assert calls_of(layer) == expected


@given(st.integers(1, 140), st.integers(1, 70))
def test_chunks_are_even(n_layers: int, n_chunks: int) -> None:
    chunks = chunks_of(n_layers, n_chunks)
    counts = [chunk.n_layers for chunk in chunks]
    assert (sum(counts), len(counts)) == (n_layers, n_chunks)
    assert max(counts) - min(counts) <= 1
    assert [i for i, chunk in enumerate(chunks) if chunk.is_first] == [0]
    assert [i for i, chunk in enumerate(chunks) if chunk.is_last] == [n_chunks - 1]


def test_embedding_and_loss_count_as_layers_where_that_divides() -> None:
    """22 layers on 8 stages: the models of arXiv 2401.10241, table 3."""
    assert [chunk.n_layers for chunk in chunks_of(22, 8)] == [2, 3, 3, 3, 3, 3, 3, 2]
    assert [chunk.n_layers for chunk in chunks_of(8, 4)] == [2] * 4
    assert [chunk.n_layers for chunk in chunks_of(11, 4)] == [3, 3, 3, 2]
    assert chunks_of(3, 1) == (Chunk(3, is_first=True, is_last=True),)


SMALL = llama(8, 1024, 16, 2816, vocab=32000)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Small recipes of all kinds."""
    tp, sp = draw(SHARDED)
    order = draw(st.sampled_from(get_args(Order)))
    size, dp, pp = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    return Recipe(
        tp=tp, sp=sp, dp=dp, pp=pp, order=order, microbatch_size=size,
        interleave=2 if order == "interleaved" else 1,
        zero=draw(st.integers(0, 3)),
        recompute=draw(st.sampled_from(["none", "selective", "attention-core", "full"])),
        global_batch=size * dp * pp * draw(st.integers(1, 3)),
    )  # fmt: skip


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 12))
def test_1f1b_is_the_closed_form(pp: int, m: int) -> None:
    """(sum of all stages) + (m - 1) (slowest stage, the one with the head) + update."""
    model = step(SMALL, Recipe(pp=pp, global_batch=m), FREE_LINKS)
    stages = [model.stage_times(stage) for stage in range(len(model.chunks))]
    each_s = [
        stage.of("forward").duration().time_s + stage.of("backward").duration().time_s
        for stage in stages
    ]
    assert each_s[-1] == max(each_s)
    update_s = max(stage.update_s for stage in stages)
    expected_s = sum(each_s) + (m - 1) * max(each_s) + update_s
    assert model.step_time_s() == pytest.approx(expected_s, rel=1e-12)


@given(SHARDED, st.sampled_from(["none", "full"]), st.integers(1, 4))
def test_a_machine_that_only_computes_takes_the_flops(
    sharded: tuple[int, bool], recompute: Any, m: int
) -> None:
    """Equation 3 of arXiv 2104.04473. With full recompute the factor is 96; the head runs once."""
    tp, sp = sharded
    shape = gpt(4, 1024, 16, 512, 8192)
    recipe = Recipe(tp=tp, sp=sp, recompute=recompute, global_batch=m)
    model = step(shape, recipe, PURE, fused_attention=False)
    factor, n_heads = (96, 16) if recompute == "full" else (72, 12)
    s, h, layers = shape.seq, shape.hidden, shape.layers
    whole = factor * m * s * layers * h**2
    flops = whole * (1 + s / (6 * h) + shape.vocab / (n_heads * layers * h))
    rate = flops_per_s(model.device, torch.bfloat16)
    assert model.step_time_s() == pytest.approx(flops / tp / rate, rel=1e-9)


@settings(max_examples=50)
@given(recipes())
def test_nothing_faster_makes_a_step_longer(recipe: Recipe) -> None:
    time_s = step(SMALL, recipe).step_time_s()
    for faster in doublings(H100):
        found_s = step(SMALL, recipe, changed(H100, faster)).step_time_s()
        assert 0.5 * time_s * (1 - 1e-9) <= found_s <= time_s * (1 + 1e-9)


@settings(max_examples=50)
@given(recipes())
def test_larger_microbatches_take_longer_and_less_per_row(recipe: Recipe) -> None:
    sizes = (recipe.microbatch_size, 2 * recipe.microbatch_size)
    once_s, twice_s = (
        step(SMALL, replace(
            recipe, microbatch_size=size, global_batch=recipe.n_microbatches * size * recipe.dp
        )).step_time_s()
        for size in sizes
    )  # fmt: skip
    assert once_s < twice_s <= 2 * once_s


@settings(max_examples=50)
@given(recipes(), st.sampled_from([4, 8]), st.booleans())
def test_every_degree_of_zero_needs_less(recipe: Recipe, dp: int, is_plain: bool) -> None:
    """Not on few ranks and layers, where two gathered layers are more than the shards save."""
    shape = gpt(64, 1024, 16, 512, 8192) if is_plain else replace(SMALL, layers=64)
    batch = recipe.n_microbatches * recipe.microbatch_size * dp
    needed = [
        step(shape, replace(recipe, zero=zero, dp=dp, pp=1, interleave=1, order="1f1b",
                            global_batch=batch)).peak_bytes()
        for zero in (3, 2, 1, 0)
    ]  # fmt: skip
    assert all(more > less for less, more in pairwise(needed))


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("zero", range(4))
def test_gradients_and_updates_over_data_parallelism(zero: int, overlapped: bool) -> None:
    """Once a step, gradients are reduced in float32; under ZeRO, parameters are gathered in 2
    bytes. ZeRO-3 does both at every use instead. A rank updates what it stores."""
    recipe = Recipe(dp=4, zero=zero, global_batch=4)
    model = step(SMALL, recipe, overlapped_sync=overlapped)
    alone = step(SMALL, Recipe(), overlapped_sync=overlapped)
    times, whole = (one.stage_times(0) for one in (model, alone))
    shared = parameters_of(model.layer, model.chunks[0])["dp"]

    def over_dp_s(kind: str, size_bytes: float) -> float:
        return model.exchange_s(kind, size_bytes, "dp")

    reduce_s = over_dp_s("reduce_scatter" if zero else "all_reduce", 4 * shared)
    gather_s = over_dp_s("all_gather", 2 * shared) if zero else 0.0
    if zero == 3:
        reduce_s = gather_s = 0.0
    expected = (reduce_s, gather_s) if overlapped else (0.0, reduce_s + gather_s)
    assert (times.sync_s, times.after.collectives_s) == pytest.approx(expected)
    assert (times.forward.overlapped_s > 0) is (zero == 3)
    launch_s = model.device.launch_s
    stored_s, whole_s = (found.update_s - launch_s for found in (times, whole))
    assert stored_s * (4 if zero else 1) == pytest.approx(whole_s)


def test_a_gather_into_a_list_copies_a_shard_of_each_rank() -> None:
    recipe = Recipe(dp=64, zero=3, global_batch=64)
    whole, lists = (step(SMALL, recipe, gathers_by_layer=by_layer) for by_layer in (True, False))
    size, device = 1e8, whole.device
    fast_s, slow_s = (model.gather_s("all_gather", size, "dp") for model in (whole, lists))
    copies_s = 64 * whole.host_s + 2 * size / device.bytes_per_s
    assert slow_s - fast_s == pytest.approx(copies_s)
    # Four calls a layer, and as many bytes: never faster.
    assert lists.step_time_s() > whole.step_time_s()


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize(("dp", "where"), [(1, -1), (2, 0)])
def test_messages_between_stages(sp: bool, dp: int, where: int) -> None:
    """Each rank sends a part and the receivers gather, or each sends the whole. Shards of a
    sequence are sent as they are. Two stages of 4 ranks share a node, two of 8 do not."""
    recipe = Recipe(tp=4, pp=2, dp=dp, sp=sp, global_batch=8)
    split, whole = step(SMALL, recipe), step(SMALL, recipe, split_messages=False)
    link, size = split.hardware.links[where], split.layer.tokens * SMALL.hidden * 2
    part_s = link.latency_s + size / 4 * link.s_per_byte
    gather_s = split.exchange_s("all_gather", size, "tp")
    whole_s = link.latency_s + size * link.s_per_byte
    assert split.message_s(0, 1) == pytest.approx(part_s if sp else part_s + gather_s)
    assert whole.message_s(0, 1) == pytest.approx(part_s if sp else whole_s)


def test_a_message_crosses_nodes_where_its_ends_are_in_two() -> None:
    """Four devices of 4 ranks on nodes of 8: stages 0 and 1 share a node, 1 and 2 do not. An
    interleaved pipeline goes from the last device back to the first."""
    model = step(SMALL, Recipe(tp=4, pp=4, interleave=2, global_batch=8))
    message_s = model.message_s
    near_s, far_s = message_s(0, 1), message_s(1, 2)
    assert near_s < far_s
    assert [message_s(a, a + 1) for a in range(2, 7)] == [near_s, far_s, near_s, far_s, near_s]
    assert message_s(2, 1) == far_s
    alone = step(SMALL, Recipe(tp=4, interleave=2, global_batch=8))
    assert alone.message_s(0, 1) == 0.0


def test_the_largest_published_run() -> None:
    """1T parameters, 64 stages x 512 microbatches: 163 TFLOP/s (arXiv 2104.04473, table 1)."""
    (run,) = (run for run in read_runs().runs if run["id"] == "meg21_t1_1T")
    assert abs(log_error(read_row(run))) < 0.1


def test_torchs_recompute_ends_before_the_last_matmul() -> None:
    """`early_stop`: nothing reads what a layer makes there. Megatron's checkpoints run it again."""
    recipe = Recipe(recompute="full", global_batch=1)
    every, fewer = (
        step(llama(2, 1024, 8, 4096), recipe, PURE, stops_recompute=stops)
        for stops in (False, True)
    )
    down = next(item for item in every.layer.items if item.name == "mlp down")
    last = [item.name for item in every.layer.items if item.is_last]
    assert last == ["mlp down", "mlp residual"]
    left_out_s = 2 * every.work([(down, 1)]).compute_s
    apart_s = every.step_time_s() - fewer.step_time_s()
    assert apart_s == pytest.approx(left_out_s) and left_out_s > 0


def test_norms_of_heads_read_queries_and_keys() -> None:
    shape = llama(1, 1024, 8, 4096)
    plain, normed = (
        LayerModel(of, Recipe(), Software()).items
        for of in (shape, replace(shape, norms_heads=True))
    )
    (norm,) = [item for item in normed if item.name == "head norm"]
    assert len(normed) == len(plain) + 1 and norm.n_parameters == 2 * 128
    assert norm.kept_bytes == 8192 * (8 + 8) * 128 * 2
