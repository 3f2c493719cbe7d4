"""A plan on its program: everything that can be computed from the two."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from autopar.caching import GC_EVERY
from autopar.codegen import count_regions
from autopar.cost.hardware import Hardware
from autopar.cost.laws import CostModel
from autopar.cost.price import (
    collectives_of,
    link_between,
    peak_of_stage,
    share_of_pairs,
    timeline_of,
)
from autopar.cost.simulate import Timeline
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.analysis import Analysis
from autopar.passes.compilation import Compilation
from autopar.passes.facts import Placed, Sources, Target, Unverified
from autopar.passes.lowering import PlacedStage
from autopar.passes.pipeline import PASSES
from autopar.plans import PlanData, Predicted
from autopar.program.communication import Collective
from autopar.program.lines import Pipeline
from autopar.report import (
    Remark,
    assumed,
    compiling,
    memory_bar,
    packed_documents,
    time_bar,
)

_SECANTS = 3  # to find the imbalance that a plan survives


@dataclass(frozen=True)
class Bound:
    """Everything that can be computed from a plan and its program."""

    compilation: Compilation

    @property
    def data(self) -> PlanData:
        return self.compilation[PlanData]

    @property
    def mesh(self) -> Mesh:
        return self.compilation[Target].mesh

    @property
    def options(self) -> Options:
        return self.compilation[Target].options

    @property
    def analysis(self) -> Analysis:
        return self.compilation[Analysis]

    @property
    def stages(self) -> tuple[PlacedStage, ...]:
        return self.compilation[Placed].stages

    @property
    def hardware(self) -> Hardware:
        return self.compilation[Hardware]

    @property
    def costs(self) -> list[CostModel]:
        return [stage.cost for stage in self.stages]

    @property
    def pipeline(self) -> Pipeline:
        """The stages lowered, joined and verified."""
        return self.compilation[Pipeline]

    @property
    def predicted(self) -> Predicted:
        return self.compilation[Predicted]

    @property
    def limit_bytes(self) -> float:
        """Bytes of a device that the plan was made for."""
        return self.data.limit_bytes or self.hardware.memory_limit_bytes

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return collectives_of(self.pipeline, self.data.optimizer)

    @property
    def assumed(self) -> Sequence[Remark]:
        """What the prediction takes for granted, in lines."""
        remarks = assumed(self.hardware, self.data, self.pipeline, self.predicted)
        shown = share_of_pairs(self.pipeline.stages, self.costs[0])
        if shown is not None:
            stages = self.timeline(with_memory=False).record.stages
            loads = [load for times in stages for load in times.loads]
            remarks = [*remarks, packed_documents(shown, loads)]
        if not self.options.compiles:
            return remarks
        eager = self.run_as(compile="none").predicted
        return [*remarks, compiling(self.predicted, eager, self.n_regions, self.hardware.is_gpu)]

    @property
    def n_regions(self) -> int:
        """How many functions a rank compiles, at most."""
        return max(map(count_regions, self.sources.values()))

    def run_as(self, **changes: Any) -> Bound:
        """The same plan with another option `compile` or `imbalance`: lines have other prices, what
        is proved stays proved."""
        target = replace(self.compilation[Target], options=replace(self.options, **changes))
        other = Compilation(PASSES, target, self.data, self.analysis)
        other.give(other[Unverified].pipeline)
        return Bound(other)

    @property
    def survives_imbalance(self) -> float | None:
        """The largest imbalance of experts' rows with which the peak is within the limit, or a
        little less; 1 if none is. None if no experts are sharded.

        The most is that all rows are of one rank. A peak is convex in the imbalance, so a secant
        from a point within the limit to one above it reaches the limit within it.
        """
        shares = [
            math.prod(stage.cost.mesh.sizes[axis] for axis in of.lowered_axes)
            for stage in self.stages
            for of in stage.strategy.operators.values()
            if of.lowered is not None and of.lowered.uneven
        ]
        if not shares:
            return None

        def peak_bytes(imbalance: float) -> float:
            pipeline = self.run_as(imbalance=imbalance).pipeline
            return max(
                peak_of_stage(pipeline, k, self.data.optimizer) for k in range(len(self.stages))
            )

        good, bad = 1.0, float(max(shares))
        at_good, at_bad = peak_bytes(good), peak_bytes(bad)
        if at_bad <= self.limit_bytes or at_good > self.limit_bytes:
            return bad if at_bad <= self.limit_bytes else good
        for _ in range(_SECANTS):
            good += (bad - good) * (self.limit_bytes - at_good) / (at_bad - at_good)
            at_good = peak_bytes(good)
        return good

    def timeline(
        self, slow: tuple[int, float] | None = None, jitter: tuple[float, int] | None = None,
        with_memory: bool = True,
    ) -> Timeline:  # fmt: skip
        """One step, event by event; `slow` and `jitter` as in `Plan.simulate`."""
        links = link_between(self.mesh, self.hardware.links)
        return timeline_of(
            self.pipeline, self.costs, self.data.optimizer, links,
            with_memory=with_memory, slow=slow, jitter=jitter,
        )  # fmt: skip

    def bars(self) -> dict[str, Any]:
        """What the step and the peak memory are made of: `time` and `memory` of the page."""
        return {
            "time": time_bar(self.pipeline, self.costs, self.timeline()),
            "memory": memory_bar(self.pipeline, self.data.optimizer, self.limit_bytes),
        }

    @property
    def sources(self) -> dict[str, str]:
        """File name -> generated source."""
        with settled_heap():
            return self.compilation[Sources].files

    def sources_on(self, device: str) -> dict[str, str]:
        """`sources`, with the kernels of a type of device: "cpu" or "cuda"."""
        made = self.compilation
        if device == made[Target].device:
            return self.sources
        target = replace(made[Target], device=device)
        return Compilation(PASSES, target, made[Pipeline], made[Placed])[Sources].files


def bind(
    data: PlanData,
    analysis: Analysis,
    mesh: Mesh,
    stages: tuple[PlacedStage, ...] | None = None,
    options: Options | None = None,
) -> Bound:
    """Place a plan on an analysed program, or take `stages` that are placed already; `options` are
    those that it runs with.

    Raises `PlanError` if the plan is for another graph, or is not legal on this one.
    """
    placed = () if stages is None else (Placed(stages),)
    target = Target(mesh, options or Options())
    compilation = Compilation(PASSES, target, data, analysis, *placed)
    _ = compilation[Placed]
    return Bound(compilation)


@contextmanager
def settled_heap() -> Iterator[None]:
    """Freeze existing objects and collect garbage rarely.

    Planning makes many small objects. Without this, every full collection would walk torch, the
    captured model and all else again.
    """
    if gc.get_freeze_count():  # whoever froze the heap unfreezes it
        yield
        return
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(max(GC_EVERY, thresholds[0]) if thresholds[0] else 0, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
