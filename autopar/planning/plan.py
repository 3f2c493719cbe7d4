"""`Plan`: the decisions of a plan, and what follows from them.

`Plan.data` holds the decisions, and is what a file holds. A bound plan has a program too. Its
prediction, code and reports are computed from the program, never read from a file; the program is
lowered on first use (`Bound`). `Plan.load` gives an unbound plan; `Plan.bind` binds it to a model.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.cost.hardware import changed, profile_of, resolve_on
from autopar.cost.price import hidden_of
from autopar.cost.simulate import Timeline
from autopar.errors import OptionError, PlanError
from autopar.mesh import Mesh
from autopar.options import PRICED, Options
from autopar.passes.binding import ExampleInputs, check_mesh, example_of, mesh_of
from autopar.passes.compilation import Compilation
from autopar.passes.explain import decisions
from autopar.passes.facts import Placed, Source, Target
from autopar.passes.pipeline import PASSES
from autopar.passes.search import PlanningResult, PlanningStats
from autopar.planning.bound import Bound, bind, settled_heap
from autopar.planning.commands import Commands, ShellModel
from autopar.planning.page import subject_of
from autopar.plans import PlanData, Predicted, load_plan, parse_storage
from autopar.program.communication import Collective
from autopar.program.graph import Program
from autopar.report import (
    Brief,
    brief,
    dot,
    explain,
    explain_name,
    facts_json,
    headline,
    page_html,
    uneven_experts,
    verdict,
)


@dataclass(frozen=True)
class ReportFiles:
    """The files of a report: the page, and the plan's graph as DOT text."""

    page: Path
    dot: Path


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


@dataclass(frozen=True, repr=False)
class Plan:
    """A parallel plan. `data` is what `save` writes; `bound` is None for an unbound plan.

    `print(plan)` shows the essence, `plan.explain()` all; a notebook shows the essence as a table.
    """

    data: PlanData
    bound: Bound | None = field(default=None, compare=False)

    @property
    def stats(self) -> PlanningStats | None:
        """Statistics of planning; None for a plan that was not made in this process."""
        if self.bound is None or PlanningResult not in self.bound.compilation:
            return None
        return self.bound.compilation[PlanningResult].stats

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The pipeline stages, first to last; with several a rank, they have the same ranks."""
        found: list[Stage] = []
        for first_rank, record in zip(self.data.first_ranks, self.data.stages, strict=True):
            modules = dict.fromkeys(key.rpartition("/")[0] for key in record.operators)
            ranks = tuple(range(first_rank, first_rank + record.n_ranks))
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
        """The schedule of the pipeline, a word of the option `schedule`."""
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

        It does not cover cuts, views and numbers of microbatches; `gap` does.
        """
        return self.data.stage_gap

    @property
    def bound_s(self) -> float | None:
        """Lower bound on every plan that was searched, seconds per step; None with `manual`.

        Searched are numbers of microbatches that divide the batch, cuts between layers, views of
        the mesh, placements, storages, and recompute of whole blocks, as the options allow.
        """
        return self.data.bound_s

    @property
    def gap(self) -> float | None:
        """1 - bound / predicted step: no plan that was searched is faster by more; None if there is
        no bound."""
        if self.bound_s is None:
            return None
        return max(0.0, 1 - self.bound_s / self.predicted.step_time_s)

    @property
    def predicted(self) -> Predicted:
        """Predicted step time, memory and communication of the bound program."""
        return self._bound("predicted").predicted

    @cached_property
    def survives_imbalance(self) -> float | None:
        """The largest `imbalance` with which the plan is within its memory limit, or a little less;
        None if no experts are sharded."""
        return self._bound("survives_imbalance").survives_imbalance

    def collectives(self) -> list[Collective]:
        """Every collective of one step."""
        return list(self._bound("collectives()").collectives)

    def code(self) -> dict[str, str]:
        """File name -> generated source."""
        return dict(self._bound("code()").sources)

    def verdict(self) -> list[str]:
        """The plan in two or three sentences: what it does, what it costs, what else would cost."""
        bound = self._bound("verdict()")
        on = self.data, bound.pipeline, bound.predicted
        return verdict(*on, bound.timeline(with_memory=False), bound.hardware)

    def explain(self, name: str | None = None) -> str:
        """The plan in words, its verdict first; with a name, what it is of and its alternatives.

        `name` is a parameter, an operator or a module: whole, starred (`h.*.mlp.c_fc.weight`) or
        its end (`wte`). The alternatives are listed with what they would cost.
        """
        bound = self._bound("explain()")
        on = self.data, bound.pipeline, bound.predicted
        if name is not None:
            return explain_name(*on, name, lambda n: decisions(bound.stages, self.data, n))
        step = bound.timeline(with_memory=False)
        survives = self.survives_imbalance
        uneven = [] if survives is None else [uneven_experts(bound.options.imbalance, survives)]
        return explain(
            *on, bound.collectives, verdict(*on, step, bound.hardware), [*bound.assumed, *uneven],
            hidden_of(bound.pipeline, bound.costs, step), bound.hardware.peak_flops_per_s,
        )  # fmt: skip

    def to_dot(self) -> str:
        """The plan as a Graphviz graph."""
        return dot(self.data.model, self._bound("to_dot()").pipeline)

    def to_json(self, replan: bool = True, shell: ShellModel | None = None) -> str:
        """The facts that the page shows, as JSON (`autopar/report/page/facts.py` says which).

        replan    plan again with other options, with half and twice the memory, and on twice the
                  nodes, for at most ten seconds each
        shell     how a command line names the model: its commands are for a shell, not Python
        """
        bound = self._bound("to_json()")
        with settled_heap():
            return facts_json(subject_of(bound, replan, shell))

    def report(
        self, path: str | Path, replan: bool = True, shell: ShellModel | None = None
    ) -> ReportFiles:
        """Write the plan as one HTML page, which needs no network and no other program.

        Its graph is also written beside it as `.dot`, for Graphviz. `replan`, `shell`: see
        `to_json`.
        Raises `OptionError` if a file cannot be written, or if `path` itself ends in `.dot`.
        """
        target = Path(path)
        graph = target.with_suffix(".dot")
        if graph == target:
            raise OptionError(f"{target} is the page's own graph", hint="name the page plan.html")
        text = page_html(f"{self.data.model}: parallel plan", self.to_json(replan, shell))
        try:
            target.write_text(text, encoding="utf-8")
            graph.write_text(self.to_dot(), encoding="utf-8")
        except OSError as error:
            raise OptionError(f"cannot write {error.filename}: {error.strerror}") from error
        return ReportFiles(target, graph)

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
        return self._bound("simulate()").timeline(slow, jitter)

    def what_if(self, changes: str) -> Plan:
        """The same plan on a changed machine: `"link.inter_node.s_per_byte=0.5x"`.

        The decisions stay, the costs are computed anew. `changes`: see `cost/hardware/what_if.py`.
        Raises `OptionError` for a key that the machine's profile does not have.
        """
        bound = self._bound("what_if()")
        analysis, machine = bound.analysis, bound.mesh
        profile = changed(profile_of(machine), changes)
        other = resolve_on(profile, machine, bound.hardware.dtype, bound.options.software)
        machine = machine.with_links(other.links, other.device)
        return Plan(self.data, bind(self.data, analysis, machine, options=bound.options))

    def command(self, shell: ShellModel | None = None) -> str:
        """What makes this plan again when it is pasted: Python, or with `shell` a command."""
        return Commands.of(self._bound("command()"), shell).plan()

    def __str__(self) -> str:
        return str(self._brief) if self.bound else f"unbound plan of {self.data.model}"

    def __repr__(self) -> str:
        return f"<Plan of {headline(self.data)}>"

    def _repr_html_(self) -> str:
        return self._brief.html() if self.bound else html.escape(str(self))

    @cached_property
    def _brief(self) -> Brief:
        bound = self._bound("a summary")
        return brief(self.data, bound.predicted, bound.hardware, self.verdict(), bound.assumed)

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
        compile: str = "none",
    ) -> Plan:
        """Bind a loaded plan to its model: check it and place it. `compile`: how it is to run.

        Raises `PlanError` if the graph or the mesh is another one, or a placement is not legal.
        """
        machine = Mesh.of(mesh) if mesh is not None else mesh_of(self.data.mesh)
        check_mesh(self.data, machine)
        source = Source(model, example_of(self.data))
        priced = {name: getattr(self.data, name) for name in PRICED}
        target = Target(machine, Options.of(loss_fn=loss_fn, compile=compile, **priced))
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
