"""`Plan`: the decisions of a plan, and what follows from them.

`Plan.data` holds the decisions, and is what a file holds. A bound plan has a program too. Its
prediction, code and reports are computed from the program, never read from a file; the program is
lowered on first use (`Bound`). `Plan.load` gives an unbound plan; `Plan.bind` binds it to a model.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.cost.hardware import Hardware, changed, profile_of, resolve, resolve_on
from autopar.cost.laws import CostModel
from autopar.cost.price import collectives_of, hidden_of, link_between, timeline_of
from autopar.cost.simulate import Timeline
from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.analysis import Analysis, compute_dtype
from autopar.passes.binding import ExampleInputs, check_mesh, example_of, mesh_of
from autopar.passes.compilation import Compilation
from autopar.passes.explain import decisions
from autopar.passes.facts import Placed, Source, Sources, Target
from autopar.passes.lowering import PlacedStage
from autopar.passes.pipeline import PASSES
from autopar.passes.search import PlanningResult, PlanningStats
from autopar.plans import PlanData, Predicted, load_plan, parse_storage
from autopar.program import Collective, Pipeline, Program
from autopar.report import ReportFiles, assumed, dot, explain, write_report


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
    def analysis(self) -> Analysis:
        return self.compilation[Analysis]

    @property
    def stages(self) -> tuple[PlacedStage, ...]:
        return self.compilation[Placed].stages

    @property
    def hardware(self) -> Hardware:
        return resolve(self.mesh, compute_dtype(self.analysis))

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
    def sources(self) -> dict[str, str]:
        """File name -> generated source."""
        with settled_heap():
            return self.compilation[Sources].files


def bind(
    data: PlanData,
    analysis: Analysis,
    mesh: Mesh,
    stages: tuple[PlacedStage, ...] | None = None,
) -> Bound:
    """Place a plan on an analysed program, or take `stages` that are placed already.

    Raises `PlanError` if the plan is for another graph, or is not legal on this one.
    """
    placed = () if stages is None else (Placed(stages),)
    compilation = Compilation(PASSES, Target(mesh, Options()), data, analysis, *placed)
    _ = compilation[Placed]
    return Bound(compilation)


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: its ranks and the modules that run on them.

    mesh_shape  (nodes, devices per node) of its ranks
    ranks       numbers of its ranks, first to last
    modules     names of the modules whose operators it runs
    axes        logical axis -> its size, as the stage's placements name them
    """

    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    modules: tuple[str, ...]
    axes: Mapping[str, int]


@dataclass(frozen=True)
class Plan:
    """A parallel plan. `data` is what `save` writes; `bound` is None for an unbound plan."""

    data: PlanData
    bound: Bound | None = field(default=None, repr=False, compare=False)

    @property
    def stats(self) -> PlanningStats | None:
        """Statistics of planning; None for a plan that was not made in this process."""
        if self.bound is None or PlanningResult not in self.bound.compilation:
            return None
        return self.bound.compilation[PlanningResult].stats

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The pipeline stages, first to last."""
        found: list[Stage] = []
        first_rank = 0
        for record in self.data.stages:
            modules = dict.fromkeys(key.rpartition("/")[0] for key in record.operators)
            ranks = tuple(range(first_rank, first_rank + record.n_ranks))
            first_rank += record.n_ranks
            found.append(
                Stage(record.mesh_shape, ranks, tuple(m for m in modules if m), dict(record.axes))
            )
        return tuple(found)

    @cached_property
    def placements(self) -> dict[str, tuple[str, ...]]:
        """Parameter -> stored placement on each logical axis of its stage: `("I", "S(0)")`."""
        return {
            name: tuple(str(p) for p in parse_storage(text, name).spec.placements)
            for name, text in self.data.parameters.items()
        }

    @cached_property
    def uses(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Parameter -> operator -> the placement that it reads on each logical axis."""
        out: dict[str, dict[str, tuple[str, ...]]] = {}
        for stage in self._bound("uses").stages:
            program = stage.analysis.program
            for info in program.parameters.values():
                out.setdefault(info.name, {})
            for operator in stage.analysis.operators:
                chosen = stage.strategy.operators[operator.name]
                for value, spec in zip(operator.inputs, chosen.inputs, strict=True):
                    if value in program.parameters:
                        key = program.keys[operator.name]
                        placements = tuple(str(p) for p in spec.placements)
                        out[program.parameters[value].name][key] = placements
        return out

    @property
    def schedule(self) -> str:
        """The schedule of the pipeline: "gpipe" or "1f1b"."""
        return self.data.schedule

    @property
    def microbatches(self) -> int:
        """Into how many microbatches a step cuts the global batch."""
        return self.data.microbatches

    @property
    def objective_s(self) -> float:
        """The objective of the solver, seconds per step."""
        return self.data.objective_s

    @property
    def stage_gap(self) -> float:
        """Bound on the distance of each stage from its optimum, relative; 0 for a recipe.

        It does not cover cuts, views and numbers of microbatches, which are chosen by estimates.
        """
        return self.data.stage_gap

    @property
    def bound_s(self) -> float | None:
        """Lower bound on every plan, seconds per step; None if there is no such proof."""
        return self.data.bound_s

    @property
    def gap(self) -> float | None:
        """1 - bound / predicted step, over all plans; None if there is no bound."""
        if self.bound_s is None:
            return None
        return max(0.0, 1 - self.bound_s / self.predicted.step_time_s)

    @property
    def predicted(self) -> Predicted:
        """Predicted step time, memory and communication of the bound program."""
        return self._bound("predicted").predicted

    def collectives(self) -> list[Collective]:
        """Every collective of one step."""
        return list(collectives_of(self._bound("collectives()").pipeline, self.data.optimizer))

    def code(self) -> dict[str, str]:
        """File name -> generated source."""
        return dict(self._bound("code()").sources)

    def explain(self, name: str | None = None) -> str:
        """The plan in words; with a parameter or operator name, that decision and its alternatives.

        The alternatives are listed with what they would cost.
        """
        bound = self._bound("explain()")
        weighed = decisions(bound.stages, self.data, name) if name is not None else ()
        collectives = self.collectives()
        taken = assumed(
            bound.hardware, compute_dtype(bound.analysis), self.data, bound.pipeline,
            bound.predicted,
        )  # fmt: skip
        return explain(
            self.data, bound.pipeline, bound.predicted, collectives, name, weighed, taken,
            hidden_of(bound.pipeline, bound.costs, self.simulate()) if name is None else (),
        )  # fmt: skip

    def to_dot(self) -> str:
        """The plan as a Graphviz graph."""
        return dot(self.data.model, self._bound("to_dot()").pipeline)

    def report(self, path: str | Path) -> ReportFiles:
        """Write the plan as one HTML page, and its graph beside it as `.dot`.

        The page shows the graph if the program `dot` is installed; else it says how to install it.
        Raises `OptionError` if `path` cannot be written.
        """
        bound = self._bound("report(path)")
        timeline = self.simulate()
        return write_report(
            path, self.data, bound.pipeline, bound.predicted, self.collectives(), timeline
        )

    def simulate(
        self,
        slow: tuple[int, float] | None = None,
        jitter: tuple[float, int] | None = None,
    ) -> Timeline:
        """One step, event by event, and the bytes of every stage over time.

        slow      (stage, factor): multiplies the stage's compute time
        jitter    (fraction, seed): lengthens every compute by up to this fraction of itself, drawn
                  from the seed
        """
        bound = self._bound("simulate()")
        return timeline_of(
            bound.pipeline,
            bound.costs,
            self.data.optimizer,
            link_between(bound.mesh, bound.hardware.links),
            with_memory=True,
            slow=slow,
            jitter=jitter,
        )

    def what_if(self, changes: str) -> Plan:
        """The same plan on a changed machine: `"link.inter_node.s_per_byte=0.5x"`.

        The decisions stay, the costs are computed anew. `changes`: see `cost/hardware/what_if.py`.
        Raises `OptionError` for a key that the machine's profile does not have.
        """
        bound = self._bound("what_if()")
        analysis, machine = bound.analysis, bound.mesh
        profile = changed(profile_of(machine), changes)
        other = resolve_on(profile, machine, compute_dtype(analysis))
        return Plan(
            self.data, bind(self.data, analysis, machine.with_links(other.links, other.device))
        )

    def __str__(self) -> str:
        return self.explain() if self.bound else f"unbound plan of {self.data.model}"

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        self.data.save(path)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read an unbound plan. Raises `PlanError` if the file is not a plan."""
        return Plan(load_plan(path))

    def bind(
        self,
        model: nn.Module,
        mesh: Any = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
    ) -> Plan:
        """Bind a loaded plan to its model: check it and place it.

        Raises `PlanError` if the graph or the mesh is another one, or a placement is not legal.
        """
        machine = Mesh.of(mesh) if mesh is not None else mesh_of(self.data.mesh)
        check_mesh(self.data, machine)
        source = Source(model, example_of(self.data))
        target = Target(machine, Options.of(loss_fn=loss_fn))
        compilation = Compilation(PASSES, source, target, self.data)
        _ = compilation[Placed]
        compilation.forget(Source)
        return Plan(self.data, Bound(compilation))

    def _bound(self, what: str) -> Bound:
        if self.bound is None:
            raise PlanError(
                f"{what} needs the model, and this plan was only loaded",
                hint="plan.bind(model), or pass it to autopar.parallelize(model, mesh, plan=plan)",
            )
        return self.bound


# Objects made between garbage collections while planning. Up to a million live as long as planning
# does. Collecting so rarely takes less than 1% of the time instead of 3%, for 0.4% more memory.
_GC_EVERY = 300_000


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
    gc.set_threshold(max(_GC_EVERY, thresholds[0]) if thresholds[0] else 0, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@settled_heap()
def plan_program(
    program: Program, mesh: Mesh, example_inputs: ExampleInputs, options: Options
) -> Plan:
    """Plan a program that is already captured."""
    source = Source(nn.Module(), example_inputs)  # captured: nothing reads the model again
    return planned(Compilation(PASSES, source, Target(mesh, options), program))


def on_program(
    plan: Plan, program: Program, example_inputs: ExampleInputs, options: Options
) -> Plan:
    """The placements of a bound plan on another capture of its model, such as a lifted one."""
    assert plan.bound is not None, "a plan that was just made is bound"
    data = replace(plan.data, graph_hash=program.hash())
    target = Target(plan.bound.mesh, options)
    source = Source(nn.Module(), example_inputs)
    return Plan(data, Bound(Compilation(PASSES, source, target, program, data)))


def planned(compilation: Compilation) -> Plan:
    """Run the search. The plan keeps the compilation, without the user's model."""
    data = compilation[PlanData]
    compilation.forget(Source)
    return Plan(data, Bound(compilation))
