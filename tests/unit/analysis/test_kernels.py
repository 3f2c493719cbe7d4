"""What operators of one kernel move, when a compiler fuses them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar import Device, Link
from autopar.cost.hardware import KernelMode
from autopar.cost.laws import CostModel
from autopar.mesh import LogicalMesh
from autopar.passes.analysis import Analysis, FusedTraffic, cut, find_runs, fold
from autopar.passes.intra import least_times_s
from tests.helpers.candidates import gpt2
from tests.helpers.captures import captured

DEVICE = Device(flops_per_s=1e12, bytes_per_s=1e11, memory_bytes=1e12, launch_s=1e-6)
ON_ONE = LogicalMesh((1,), ("dp",), (Link(1e-6, 1e-9),), DEVICE)
EAGER, COMPILED = CostModel(ON_ONE), CostModel(ON_ONE, kernels="compiled")


class Steps(nn.Module):
    """What a function makes of the batch and a weight, as a loss."""

    def __init__(self, steps: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.steps = nn.Parameter(torch.ones(16, 16)), steps

    def forward(self, x: Tensor) -> Tensor:
        return self.steps(x, self.weight).sum()


def analysis_of(steps: Callable[[Tensor, Tensor], Tensor]) -> Analysis:
    return Analysis.of(captured(Steps(steps), {"x": torch.zeros(8, 16)}))


def traffic(analysis: Analysis) -> dict[str, FusedTraffic]:
    return dict(analysis.fused_traffic("compiled"))


def written(analysis: Analysis) -> set[str]:
    """The results of fused operators that reach memory."""
    of = traffic(analysis)
    return {
        name
        for o in analysis.operators
        if o.name in of
        for name, share in zip(o.outputs, of[o.name].forward[len(o.inputs) :], strict=True)
        if share
    }


def times_s(analysis: Analysis, cost: CostModel) -> tuple[float, float]:
    """Seconds of all operators, and those of launches."""
    whole_s, launches_s = least_times_s(analysis, cost).sum(axis=1).tolist()
    return whole_s, launches_s


def test_eagerly_nothing_is_fused() -> None:
    assert gpt2().fused_traffic("eager") == {}
    assert traffic(gpt2())


def test_a_block_of_gpt2_writes_what_others_read_or_keep() -> None:
    """GELU of eight operators and the norm after the residual sum; a bias is part of its matmul."""
    program, own = gpt2().program, written(gpt2())
    block = {o.name: o for o in gpt2().operators if program.block(o.name) == "transformer.h.1"}
    fused = [name for name in block if name in traffic(gpt2())]
    kinds = [str(block[name].call.op).split(".")[1] for name in fused]
    gelu = ["mul", "pow", "mul", "add", "mul", "tanh", "add", "mul"]
    assert kinds == ["add", "layer_norm", *gelu]
    residual, norm, half, *_, tanh, plus_one, result = fused
    assert own & {*fused} == {residual, norm, half, tanh, plus_one, result}
    launches = np.sum([traffic(gpt2())[name].launches for name in fused], axis=0)
    assert launches[:2].tolist() == [2, 2]


def test_a_gelu_that_runs_again_is_free_and_a_norm_is_not() -> None:
    """GELU reads and writes two values less in forward than it writes again, and backward reads
    three less. The norm keeps its input anyway, which it reads again, to write its result."""
    analysis = gpt2()
    program, types = analysis.program, analysis.types.tensors
    again: dict[str, float] = {}
    for operator in analysis.operators:
        if program.block(operator.name) == "transformer.h.1" and operator.name in traffic(analysis):
            own = traffic(analysis)[operator.name]
            names = (*operator.inputs, *operator.outputs)
            moved = sum(k * types[n].size_bytes for k, n in zip(own.again, names, strict=True))
            kind = str(operator.call.op).split(".")[1]
            again[kind] = again.get(kind, 0.0) + moved
    assert again["layer_norm"] > 0.0
    assert again["tanh"] == again["pow"] == again["mul"] == 0.0


def test_a_chain_costs_as_much_as_two_operators() -> None:
    def chain(n: int) -> Callable[[Tensor, Tensor], Tensor]:
        def steps(x: Tensor, weight: Tensor) -> Tensor:
            y = x @ weight
            for _ in range(n):
                y = -y
            return y @ weight

        return steps

    two, five = (times_s(analysis_of(chain(n)), COMPILED) for n in (2, 5))
    assert two == pytest.approx(five, rel=1e-12)
    eager = [times_s(analysis_of(chain(n)), EAGER) for n in (2, 5)]
    nothing_kept = 4 * 8 * 16 * 4 / DEVICE.bytes_per_s + 2 * DEVICE.launch_s
    alone = 5 * 8 * 16 * 4 / DEVICE.bytes_per_s + 2 * DEVICE.launch_s
    assert eager[0][0] - two[0] == pytest.approx(2 * alone - nothing_kept)
    assert eager[1][0] - five[0] == pytest.approx(5 * alone - nothing_kept)


def test_a_matmul_on_the_way_divides_a_kernel() -> None:
    """The sum at the end reads `y` again, because a matmul stands between."""

    def steps(x: Tensor, weight: Tensor) -> Tensor:
        y = (x @ weight).neg().neg()
        return y + y.neg().neg() @ weight

    analysis = analysis_of(steps)
    negs = [o.name for o in analysis.operators if "neg" in str(o.call.op)]
    assert written(analysis) & {*negs} == {negs[1], negs[3]}
    (total,) = (o for o in analysis.operators if "add" in str(o.call.op))
    assert traffic(analysis)[total.name].forward[:2] == (1.0, 1.0)


def test_a_random_draw_divides_a_kernel() -> None:
    def steps(x: Tensor, weight: Tensor) -> Tensor:
        y = (x @ weight).neg().neg()
        return functional.dropout(y, 0.5).neg().neg()

    analysis = analysis_of(steps)
    found = traffic(analysis)
    assert not any("dropout" in name for name in found)
    assert [found[n].launches[:2] for n in found if "neg" in n] == [(1, 1), (0, 0), (1, 1), (0, 0)]


def test_a_kernel_reads_each_value_once_and_halves_as_halves() -> None:
    def rotate(x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight
        return y * 2 + torch.cat((-y[:, 8:], y[:, :8]), dim=1) * 3

    found = traffic(analysis_of(rotate))
    reads = sum(sum(of.forward[:-1]) for of in found.values())
    assert reads == pytest.approx(1.0)

    def halves(x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight
        return -y[:, 8:] + y[:, :8]

    found = traffic(analysis_of(halves))
    assert [of.forward for name, of in found.items() if "sum" not in name] == [
        (1.0, 0.0), (0.0, 1.0, 0.0),
    ]  # fmt: skip


def test_compiled_takes_no_longer_than_eager() -> None:
    whole_s, launches_s = times_s(gpt2(), EAGER)
    compiled_s, compiled_launches_s = times_s(gpt2(), COMPILED)
    assert compiled_s < 0.9 * whole_s and compiled_launches_s < launches_s


def test_a_stage_moves_no_less_than_its_operators_in_the_whole() -> None:
    whole, n = traffic(gpt2()), len(gpt2().operators)
    for end in range(1, n, 5):
        for program in cut(gpt2().program, (end, n)):
            part = traffic(gpt2().part(program))
            assert part.keys() == whole.keys() & {node.name for node in program.operators}
            for name, of in part.items():
                assert np.all(np.array(of.forward) >= whole[name].forward), (end, name)
                assert np.all(np.array(of.backward) >= whole[name].backward), (end, name)
                assert np.all(np.array(of.launches) >= whole[name].launches), (end, name)


def test_folded_blocks_move_what_they_do_in_the_whole() -> None:
    runs = find_runs(gpt2())
    folded = fold(gpt2(), runs)
    whole, of = traffic(gpt2()), traffic(folded.analysis)
    assert len(folded.analysis.operators) < len(gpt2().operators)
    for i, operator in enumerate(gpt2().operators):
        stand_in = folded.analysis.operators[folded.stands_for[i]]
        assert whole.get(operator.name) == of.get(stand_in.name)


def moved(analysis: Analysis, mode: KernelMode) -> tuple[float, float]:
    """Sizes of x (8 x 16) that fused operators move, forward and backward."""
    of, types = analysis.fused_traffic(mode), analysis.types.tensors
    sizes = {
        o.name: [types[n].size_bytes / (8 * 16 * 4) for n in (*o.inputs, *o.outputs)]
        for o in analysis.operators
    }
    forward, backward = (
        sum(float(np.dot(getattr(own, part), sizes[name])) for name, own in of.items())
        for part in ("forward", "backward")
    )
    return forward, backward


def test_a_softwares_kernels_keep_nothing_inside() -> None:
    """SwiGLU reads two values and writes one; backward reads both and a gradient, and writes two.
    A compiler's regions keep what SiLU made, as autograd does."""

    def gated(x: Tensor, weight: Tensor) -> Tensor:
        return (functional.silu(x @ weight) * (x @ weight.t())) @ weight

    analysis = analysis_of(gated)
    assert moved(analysis, "fused") == (3.0, 5.0)
    assert moved(analysis, "compiled") == (4.0, 6.0)


def test_a_softwares_matmul_adds_its_bias() -> None:
    """Forward moves nothing more, and backward reads the gradient once, for the bias."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(x)).sum()

    analysis = Analysis.of(captured(Biased(), {"x": torch.zeros(8, 16)}))
    assert analysis.fused_traffic("fused").keys() == analysis.bias_adds.keys()
    assert moved(analysis, "fused") == (0.0, 1.0)
    assert moved(analysis, "compiled") == (0.0, 0.0), "a compiler leaves the sum as it is"
