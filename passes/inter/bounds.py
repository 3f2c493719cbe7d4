"""Lower bounds on the step time of pipelines, known before any placement problem is built.

The bound assumes that every operator of a stage is shared equally by all devices of the stage, and
that there are no collectives and updates (`least_times_s` of `passes/intra/intra_op.py`).
With m microbatches on n devices, layers k to l take at least

    each(k, l, n) = sum over their operators of  (whole - launches) / (m n)  +  launches

seconds per microbatch (`StageBounds.each_s`), and hold at least an equal share of their parameters,
gradients and optimizer state. From these, the least span of all plans bounds the step
(`StageBounds.step_s`). The bound thus includes the bubble, layers that do not divide evenly, the
launches of small microbatches, and messages (`messages.py`). No simulated step is below it. It is
tighter with what stages take at least on a view (`layer_bounds.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.arrays import Array, BoolArray
from autopar.mesh import Link, Mesh
from autopar.passes.analysis import Analysis, stored_dtype
from autopar.passes.inter.layers import Layers, sums_of_ranges
from autopar.passes.inter.messages import LeastMessages
from autopar.passes.intra import static_parts
from autopar.passes.solvers.stages import StageProblem, least_span_s, span_s


def step_bound_s(
    whole_s: Array,
    work_s: Array,
    n_microbatches: int,
    is_1f1b: bool,
    once_s: float = 0.0,
    passed_s: Array | float = 0.0,
) -> float:
    """No step of these stages, [stages], is faster: `whole_s` is all that each takes in a step,
    `work_s` what its microbatches take, `passed_s` a message to the next stage, and back.

    A stage does the rest once a step. It may do so while it waits for its neighbours, but the first
    stage does its `once_s` before its first microbatch and after its last.
    """
    added_s, first = work_s / n_microbatches, np.arange(len(work_s)) == 0
    m = n_microbatches if is_1f1b else None
    added_s = added_s + once_s * first + passed_s
    return max(float(whole_s.max()), span_s(work_s + once_s * first, added_s, m))


def shared_step_bound_s(
    whole_s: Array, work_s: Array, added_s: Array, devices: Sequence[int]
) -> float:
    """No step of these stages, [stages], is faster, in any order: a device may have several.

    `added_s` is what one microbatch takes on a stage at least before the next stage has it, and, if
    backward is one action, after that stage has handed its gradient back; with its messages. A
    device does the work of stage k, and of those after k that it has, after the first microbatch
    passed the stages before k. If backward is one action, the last of that work is a backward of k
    or of a later stage. Its gradient then passes back through the stages before k.
    """
    at = np.asarray(devices)
    before_s = np.cumsum(added_s) - added_s
    from_here_s = np.triu(at[:, None] == at) @ work_s
    return float(max(np.bincount(at, whole_s).max(), (before_s + from_here_s).max()))


@dataclass(frozen=True, eq=False)
class StageBounds:
    """Least seconds and bytes of every range of layers of one program, [first layer, last layer].

    `shared_s` is divided by devices and microbatches. `static_parts` are those of parameters
    (`passes/intra/least.py`), in the first layer that reads them: [4, ...]. `launches_s` is
    paid in full on every device for every microbatch. `forward_s` has both of forward alone, of
    each layer. `is_possible` has the ranges with a parameter
    to optimise. `is_1f1b` is the order of microbatches. `given` has the devices of each stage, if
    the user gave them: every layer is one.
    """

    shared_s: Array
    launches_s: Array
    static_parts: Array
    messages: LeastMessages
    is_possible: BoolArray
    forward_s: Array
    budget_bytes: float
    is_1f1b: bool = True
    given: Sequence[int] = ()

    @staticmethod
    def of(
        analysis: Analysis, phases_s: Array, layers: Layers, links: Sequence[Link], optimizer: str,
        budget_bytes: float, is_1f1b: bool = True, given: Sequence[int] = (),
    ) -> StageBounds:  # fmt: skip
        """`phases_s` are the `least_phases_s` of the program."""
        forward_s, of_layers = (
            np.add.reduceat(
                np.stack((times_s[0] - times_s[1], times_s[1])), [0, *layers.ends[:-1]], axis=1
            )
            for times_s in (phases_s[0], phases_s.sum(axis=0))
        )
        static, learns = _parameters(analysis, layers, optimizer)
        ranges = np.triu(np.ones((layers.n_layers, layers.n_layers), dtype=bool))
        is_possible = ranges & (sums_of_ranges(learns) > 0)
        shared_s, launched_s, *parts = map(sums_of_ranges, (*of_layers, *static))
        messages = LeastMessages.of(analysis, layers, links)
        least = shared_s, launched_s, np.stack(parts), messages, is_possible, forward_s
        return StageBounds(*least, budget_bytes, is_1f1b, given)

    def each_s(self, n_ranks: int, n_microbatches: int) -> Array:
        """Least seconds of one microbatch on `n_ranks` devices, [first layer, last layer]."""
        return self.shared_s / (n_microbatches * n_ranks) + self.launches_s

    def added_s(
        self, last_layers: Sequence[int], n_ranks: int, m: int, each_s: Array,
        devices: Sequence[int], splits_backward: bool,
    ) -> Array:  # fmt: skip
        """`added_s` of `shared_step_bound_s`, [stages]; `each_s` is one microbatch, both ways."""
        firsts, at = [0, *(last + 1 for last in last_layers[:-1])], np.asarray(devices)
        on, messages = (n_ranks, m), self.messages
        is_sent = np.append(at[1:] != at[:-1], False)
        if not splits_backward:
            return each_s + is_sent * messages.passed_s(*on)[firsts, last_layers]
        shared_s, launches_s = np.add.reduceat(self.forward_s, firsts, axis=1)
        onward_s = messages.onward_s(*on)[firsts, last_layers]
        added_s: Array = shared_s / (m * n_ranks) + launches_s + is_sent * onward_s
        return added_s

    def may_be(self, n_ranks: int) -> BoolArray:
        """[first layer, last layer]: may it be a stage of `n_ranks` devices?"""
        fits: BoolArray = self.static_parts[0] / n_ranks <= self.budget_bytes
        if self.given:
            fits &= np.diag(np.equal(self.given, n_ranks))
        return self.is_possible & fits

    def span_of(self, last_layers: Sequence[int], n_ranks: int, n_microbatches: int) -> float:
        """Lower bound on a step whose stages end with these layers and have `n_ranks` devices."""
        firsts = [0, *(last + 1 for last in last_layers[:-1])]
        each_s = self.each_s(n_ranks, n_microbatches)[firsts, last_layers]
        passed_s = self.messages.passed_s(n_ranks, n_microbatches)[firsts, last_layers]
        m = n_microbatches if self.is_1f1b else None
        return span_s(n_microbatches * each_s, each_s + passed_s, m)

    def most_stages(self, mesh: Mesh, least_ranks: int, n_microbatches: int) -> int:
        """No plan that is worth a try has more stages, of at least `least_ranks` devices each."""
        return min(len(self.shared_s), mesh.n_ranks // least_ranks, n_microbatches)

    def step_s(
        self, mesh: Mesh, sizes: Sequence[int], n_microbatches: int, n_stages: int | None
    ) -> float:
        """Lower bound on a step of all pipelines whose stages have `sizes` devices.

        None for `n_stages` allows any number of stages. Infinite if there is no such pipeline.
        """
        may_be = np.stack([self.may_be(n) for n in sizes], axis=2)
        each_s, passed_s = (
            np.stack([of(n, n_microbatches) for n in sizes], axis=2)[may_be]
            for of in (self.each_s, self.messages.passed_s)
        )
        first, last, config = (np.ascontiguousarray(at) for at in np.nonzero(may_be))
        m = n_microbatches if self.is_1f1b else None
        shape = len(each_s), n_stages or (1 if m is None else self.most_stages(mesh, min(sizes), m))
        work_s = np.ascontiguousarray(np.broadcast_to(n_microbatches * each_s[:, None], shape))
        added_s = np.ascontiguousarray(np.broadcast_to((each_s + passed_s)[:, None], shape))
        return least_span_s(
            StageProblem(
                first, last, config, work_s, added_s, tuple(sizes),
                len(may_be), mesh.n_ranks, n_stages, mesh.devices_per_node, m,
            )
        )  # fmt: skip


def _parameters(analysis: Analysis, layers: Layers, optimizer: str) -> tuple[Array, Array]:
    """`static_parts` of the parameters that each layer is the first to read, [4, layers]; and how
    many parameters that learn it reads, [layers]."""
    types, infos, seen = analysis.types.tensors, analysis.program.parameters, set[str]()
    static, learns = np.zeros((4, layers.n_layers)), np.zeros(layers.n_layers)
    for layer, (first, end) in enumerate(layers.ranges):
        read = {n for o in analysis.operators[first:end] for n in o.inputs} & infos.keys()
        new = (types[n] for n in read - seen)
        static[:, layer] = static_parts(new, stored_dtype(analysis), optimizer)
        learns[layer] = sum(infos[n].requires_grad for n in read)
        seen |= read
    return static, learns
