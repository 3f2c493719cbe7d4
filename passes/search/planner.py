"""The planner: the space of plans as nodes, and the plan that branch and bound finds in it.

    one stage        every logical view of the mesh x numbers of microbatches (`levels.py`)
    more stages      pipelines, or those of the stages that the user gives (`several_stages.py`)
    recipes          plain plans, evaluated first (`recipes.py`)
    the user's own   `manual=`: this alone

The search is `BranchAndBound.run` (`branch_bound.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from autopar.cost.hardware import Hardware
from autopar.cost.memory import EXPANDABLE, footprint_of_plan, least_margin
from autopar.cost.price import StepPricer
from autopar.errors import InfeasibleError, MeshError, OptionError
from autopar.manual import Manual
from autopar.mesh import LogicalMesh, Mesh, factored_view
from autopar.options import Options
from autopar.passes.analysis import Analysis
from autopar.passes.inter import (
    Candidate,
    PipelineSpace,
    StageLayout,
    all_views,
    axes_text,
    check_degrees,
    check_experts,
    check_pinned_axes,
    check_ranks,
    distinct_views,
    equal_pipelines,
    given_ends,
    has_plain_order,
    microbatch_counts,
    n_operators,
    other_orders,
    pinnable_views,
    pins_on,
    plain_order,
    recipe_counts,
    recipe_limits,
    submesh_sizes,
    views_of,
)
from autopar.passes.intra import (
    Constraints,
    Prices,
    least_step_s,
    least_times_s,
    shared_s,
    too_little_memory,
    unpadded_static_bytes,
)
from autopar.passes.search.axis_names import AxisNames
from autopar.passes.search.branch_bound import BranchAndBound, Node
from autopar.passes.search.contexts import ContextNodes
from autopar.passes.search.evaluator import Evaluator
from autopar.passes.search.levels import Levels
from autopar.passes.search.outcome import PlanningResult, alternatives_of
from autopar.passes.search.recipes import RecipeNodes, known_layouts, recipes_on
from autopar.passes.search.several_stages import SeveralStages
from autopar.passes.search.simplicity import Simplicity, simplicity_of
from autopar.passes.search.simulator import Simulator, Solved
from autopar.passes.search.slower import WhySlower
from autopar.passes.search.time_limit import TimeLimit, TimeUp
from autopar.passes.solvers.problem import TimeLimitError, within
from autopar.plans import Alternative, InputSignature
from autopar.units import format_bytes, format_seconds

# So many candidates that do not fit are simulated at most, to say how much the leanest needs.
_MOST_LEANEST = 8
# Recipes of one stage that take so many times the least are slow. Those of several are tried, too;
# first, if the slow ones do not fit without recompute.
_FAR = 1.5
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Planner:
    """Plans one captured program on one machine; `inputs` are one global batch, to count tokens."""

    analysis: Analysis
    mesh: Mesh
    hardware: Hardware
    options: Options
    inputs: tuple[InputSignature, ...] = ()
    report: Progress = lambda text: None
    spent_s: float = 0.0
    _prices: Prices = field(default_factory=Prices, init=False)

    @cached_property
    def pricer(self) -> StepPricer:
        on = self.mesh, self.hardware, self.options.optimizer
        return StepPricer.of(*on, self.analysis.batch.n_samples, self.inputs)

    @cached_property
    def budget_bytes(self) -> float:
        options = self.options
        return self.hardware.limit_bytes(options.memory_limit, options.memory_margin)

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator(
            self.analysis, self.options, self.hardware, self.budget_bytes,
            all_views(self.mesh, self.hardware, self.options, self._sizes),
            tuple(microbatch_counts(self.analysis, self.options, self.mesh.n_ranks)),
            TimeLimit.after(self.options.time_limit_s, self.spent_s), prices=self._prices,
        )  # fmt: skip

    @property
    def _sizes(self) -> list[int]:
        """Possible numbers of ranks of a stage."""
        is_one = self.options.stages == 1 or "pipeline" in self.options.forbid
        return [*([] if is_one else submesh_sizes(self.mesh)), self.mesh.n_ranks]

    @cached_property
    def simulator(self) -> Simulator:
        return Simulator(self.evaluator, self.pricer)

    @cached_property
    def levels(self) -> Levels:
        return Levels(self.simulator)

    @cached_property
    def pipelines(self) -> SeveralStages | None:
        """The nodes of several stages; None if there are none to search."""
        options = self.options
        if options.manual is not None or self.mesh.n_ranks < 2:
            return None
        if options.n_stages == 1 or "pipeline" in options.forbid:
            return None
        return SeveralStages(self.levels, self._space(options.n_stages))

    def _space(self, n_stages: int | None) -> PipelineSpace:
        on = self.analysis, self.mesh, self.hardware, self.options
        return PipelineSpace.of(*on, self.budget_bytes, n_stages, self._prices)

    def run(self) -> PlanningResult:
        """The best plan; once `time_limit_s` has passed, the best so far.

        Raises `TimeLimitError` if twice that has passed without a plan, `InfeasibleError` if
        nothing fits, `MeshError` or `OptionError` for more stages than ranks or operators.
        """
        self._check_stages()
        self._check_degrees()
        self._check_state()
        options = self.options
        is_timed_out, limit = False, self.evaluator.limit

        def before(node: Node, search: BranchAndBound) -> None:
            """Report what comes next; end the search if the time is up."""
            limit.has_plan = bool(search.found)
            limit.check()
            self.report(f"planning {node.name}{_progress(search)}")

        search = BranchAndBound(options.tolerance, options.tie, self._rank, before)
        notes = list[Alternative]()
        try:
            with limit.running():
                far_s = math.inf if options.manual is not None else _FAR * self._least_s
                far = search.run(self._recipes(), far_s)
                if self.pipelines is not None and search.incumbent_s > far_s:
                    search.run(self.pipelines.recipes())
                search.run(chain(far, self._roots()))
                if self.pipelines is not None and (search.found or not has_plain_order(options)):
                    has_stages = bool(search.found) and len(search.chosen.stages) > 1
                    for has_context in (False, True):
                        search.run(self.pipelines.other_pipelines(has_stages, has_context))
        except TimeUp:
            is_timed_out = True
            passed = f"not tried when time_limit_s={options.time_limit_s:g} had passed"
            notes.append(Alternative("the rest", None, passed))
        if not search.found and search.unsolved:
            raise search.unsolved[0]
        if not search.found and not self.levels.errors and not is_timed_out:
            raise self._no_candidate()
        if not search.found:
            search.found.extend(self._leanest_that_fit())
        if not search.found and is_timed_out:
            raise self._no_plan_in_time()
        if not search.found:
            raise self._nothing_fits(self.levels.errors)
        chosen = search.chosen
        search.nodes.extend(self._known(chosen.step_time_s))
        bound_s = None if options.manual is not None else search.bound_s
        if is_timed_out and bound_s is None:  # only recipes were tried
            bound_s = self._least_s
        n_configurations = self.pipelines.n_configurations if self.pipelines else 0
        why = None if is_timed_out else WhySlower(self.simulator, chosen, self.pricer)
        named = AxisNames(self.simulator, options).named
        rows = alternatives_of(search, self.levels.errors, chosen, named, why)
        stats = self.evaluator.stats(n_configurations)
        return PlanningResult(named(chosen), (*rows, *notes), bound_s, search.ruled_out, stats)

    @cached_property
    def _least_s(self) -> float:
        """No step takes less: all operators in equal shares."""
        return least_step_s(self.analysis, self.evaluator.cost_of(self._any_view))

    def _rank(self, solved: Solved) -> Simplicity:
        pipeline = self.simulator.pipeline(solved.stages, solved.candidate.schedule)
        return simplicity_of(solved, pipeline, self.options.optimizer)

    def _recipes(self) -> Iterator[Node]:
        """The first incumbents; none with `force`, which pins what recipes decide."""
        options, nodes = self.options, RecipeNodes(self.levels)
        if options.manual is not None:
            yield from self._manual(options.manual)
        elif options.n_stages in (None, 1) and not options.force and self.analysis.batch.size:
            views = views_of(self.mesh, self.hardware, options, 0, self.mesh.n_ranks)
            for recipe in recipes_on(views, options):
                yield nodes.single_stage(recipe)

    def _known(self, chosen_s: float) -> Iterator[Node]:
        """Layouts that are known by name, for the rows of the result."""
        options, nodes = self.options, RecipeNodes(self.levels)
        is_one = options.n_stages in (None, 1) and options.mesh_shape == "auto"
        if not is_one or options.manual or options.force or not self.analysis.batch.size:
            return
        views = views_of(self.mesh, self.hardware, options, 0, self.mesh.n_ranks)
        for layout in known_layouts(self.mesh, views, options.forbid):
            yield from nodes.priced(layout, chosen_s)

    def _manual(self, manual: Manual) -> Iterator[Node]:
        """The user's recipe; with stages, more microbatches mean a smaller bubble."""
        if self.options.force:
            raise OptionError("manual is the whole recipe; force cannot be combined with it")
        if manual.pp == 1:
            check_ranks(manual, self.mesh)
            check_experts(manual, self.analysis)
            limits, view = recipe_limits(self.options, manual), self._view(manual.axes)
            counts = recipe_counts(self.analysis, self.options, manual, self.mesh.n_ranks)
            named = [self._single_stage("manual recipe", view, limits, m) for m in counts]
            yield RecipeNodes(self.levels).root(named)
            return
        space = self._space(manual.pp)
        several = SeveralStages(self.levels, space)
        yield from several.of_equal_stages(equal_pipelines(space, "manual"))

    def _single_stage(self, name: str, view: LogicalMesh, limits: Constraints, m: int) -> Candidate:
        return Candidate(
            name, (n_operators(self.analysis.program),), (StageLayout(view, limits),), m,
            schedule=plain_order(self.options),
        )  # fmt: skip

    def _roots(self) -> Iterator[Node]:
        if self.options.manual is not None:
            return
        cost = self.evaluator.cost_of(self._any_view)
        times_s = least_times_s(self.analysis, cost).sum(axis=1)
        sizes = [self.mesh.n_ranks] if self.options.n_stages in (None, 1) else []
        views = distinct_views(self.mesh, self.hardware, self.options, sizes)
        for view in pinnable_views(self.options, views):
            pins = pins_on(self.analysis, self.options, view)
            limits = Constraints(self.options.forbid, pins=pins)
            for m in self.evaluator.counts:
                candidate = self._single_stage(f"search on {axes_text(view)}", view, limits, m)
                bound_s = shared_s(times_s, self.analysis, self.mesh.n_ranks, m)
                yield self.levels.root(candidate, bound_s)
        options = self.options
        if sizes and options.mesh_shape == "auto" and not options.force:
            yield from ContextNodes(self.levels, self.mesh, times_s).roots()
        if self.pipelines is not None:
            yield from self.pipelines.roots()

    def _leanest_that_fit(self) -> list[Solved]:
        """The plans of fewest bytes that fit after all: the solver's bytes may be above a peak.

        Those that need least by their placements are simulated, until no other needs less.
        """
        by_name = dict[str, tuple[float, Candidate]]()
        for error, candidate in self.levels.errors:
            if error.least_bytes is not None:
                known_bytes, _ = by_name.get(candidate.name, (math.inf, candidate))
                if error.least_bytes < known_bytes:
                    by_name[candidate.name] = error.least_bytes, candidate
        by_size = sorted(by_name.values(), key=lambda pair: pair[0])
        for least_bytes, candidate in by_size[:_MOST_LEANEST]:
            seen_bytes = min((s.peak_bytes for s in self.simulator.every_solved), default=math.inf)
            if least_bytes < seen_bytes:
                self._simulate_leanest(candidate)
        every = self.simulator.every_solved
        return [of for of in every if within(self.budget_bytes, of.peak_bytes)]

    def _nothing_fits(self, errors: Sequence[tuple[InfeasibleError, Candidate]]) -> InfeasibleError:
        """The error for the leanest plan of all that were simulated."""
        if not self.simulator.every_solved:
            return self._suggest_setting(errors[0][0])
        leanest = min(self.simulator.every_solved, key=lambda solved: solved.peak_bytes)
        where, m = leanest.candidate.name, leanest.candidate.n_microbatches
        if len(leanest.stages) == 1:  # the name of a pipeline says it
            where += f", {m} microbatch{'es' if m > 1 else ''}"
        what = f"{self._state_text}, and the leanest plan seen"
        error = too_little_memory(self.budget_bytes, leanest.peak_bytes, where, what)
        return self._suggest_setting(error)

    def _suggest_setting(self, error: InfeasibleError) -> InfeasibleError:
        """The error; where another setting of the allocator is enough, that is the first hint."""
        options, needed_bytes = self.options, error.least_bytes
        if options.memory_limit is not None or options.memory_margin is not None:
            return error
        margin = least_margin("expandable", self.hardware)
        limit_bytes = self.hardware.limit_bytes(None, margin)
        if needed_bytes is None or not within(limit_bytes, needed_bytes):
            return error
        reserved_bytes = footprint_of_plan(needed_bytes, self.hardware).reserved_bytes
        hint = (
            f"torch's allocator would reserve {format_bytes(reserved_bytes)}: set {EXPANDABLE} and "
            f"memory_margin={margin:g}; or {error.hint}"
        )
        return InfeasibleError(error.what, where=error.where, hint=hint, least_bytes=needed_bytes)

    def _simulate_leanest(self, candidate: Candidate) -> None:
        try:
            self.simulator.simulate_leanest(candidate)
        except InfeasibleError as error:  # its constraints leave no placement at all
            self.report(f"{candidate.name}: {error.what}")

    def _check_state(self) -> None:
        """Raises `InfeasibleError` if not even an equal share of parameters and state fits."""
        least_bytes, budget_bytes = self._state_bytes, self.budget_bytes
        if within(budget_bytes, least_bytes):
            return
        raise InfeasibleError(
            f"no plan fits in {format_bytes(budget_bytes)} per device; {self._state_text}",
            hint=f"{self._nearest_text} or a leaner dtype, or raise memory_limit",
            least_bytes=least_bytes,
        )

    @property
    def _nearest_text(self) -> str:
        """What is nearest to the request and may fit."""
        mesh = self.mesh
        whole_bytes = self._state_bytes * mesh.n_ranks
        n_devices = math.ceil(whole_bytes / max(self.budget_bytes, 1.0))
        if n_devices > mesh.devices_per_node:
            n_nodes = math.ceil(n_devices / mesh.devices_per_node)
            nearest = f"use at least {n_nodes} nodes of {mesh.devices_per_node} devices"
        else:
            nearest = f"use at least {n_devices} devices"
        sgd_bytes = unpadded_static_bytes(self.analysis, "sgd") / mesh.n_ranks
        if self.analysis.program.training and within(self.budget_bytes, sgd_bytes):
            nearest += f', optimizer="sgd" ({format_bytes(sgd_bytes)} here)'
        return nearest

    @property
    def _state_bytes(self) -> float:
        """Lower bound on the bytes per device of any plan."""
        return unpadded_static_bytes(self.analysis, self.options.optimizer) / self.mesh.n_ranks

    @property
    def _state_text(self) -> str:
        what = (
            "parameters, gradients and optimizer"
            if self.analysis.program.training
            else "parameters"
        )
        over = f", divided over {self.mesh.n_ranks} ranks," if self.mesh.n_ranks > 1 else ""
        return f"{what} alone{over} need at least {format_bytes(self._state_bytes)}"

    @property
    def _any_view(self) -> LogicalMesh:
        """For what does not depend on axes."""
        return self._view({"dp": self.mesh.n_ranks, "tp": 1})

    def _view(self, axes: Mapping[str, int]) -> LogicalMesh:
        return factored_view(self.mesh, self.hardware.links, self.hardware.device, axes)

    def _check_stages(self) -> None:
        """Raises `MeshError` or `OptionError` if there are more stages than ranks or operators.

        Raises the errors of `given_ends`, and `InfeasibleError` if no stage can have an axis that
        `force` shards over.
        """
        n_stages, n_ranks = self.options.stages, self.mesh.n_ranks
        if self.options.force and self.options.manual is None:
            self._check_pins()
        if isinstance(n_stages, tuple) and not has_plain_order(self.options):
            raise OptionError(
                f"schedule={self.options.schedule!r} has equal stages, and stages= gives modules",
                hint="give a number of stages, or schedule='1f1b'",
            )
        if isinstance(n_stages, tuple):
            given_ends(self.analysis, self.mesh, n_stages)
        if not isinstance(n_stages, int):
            return
        chunks = [of.n_chunks for of in other_orders(self.options)]
        most_chunks = 1 if has_plain_order(self.options) else max(chunks)
        if n_stages > n_ranks * most_chunks:
            raise MeshError(f"stages={n_stages} cannot share {n_ranks} ranks")
        n_all = n_operators(self.analysis.program)
        if n_stages > n_all:
            raise OptionError(f"{n_stages} stages of {n_all} operators")

    def _check_degrees(self) -> None:
        """Raises `MeshError` if no stage can have the degrees of `mesh_shape`."""
        stages, shape = self.options.stages, self.options.mesh_shape
        if isinstance(shape, str):
            return
        if self.options.manual is not None:
            raise OptionError("manual is the whole recipe; mesh_shape cannot fix its degrees, too")
        if isinstance(stages, tuple):
            for stage in stages:
                check_degrees(self.mesh, self.options, [stage.n_ranks])
        else:
            check_degrees(self.mesh, self.options, self._stage_sizes)

    @property
    def _stage_sizes(self) -> list[int]:
        """As `_sizes`, without the whole mesh if there are several stages."""
        return self._sizes if self.options.stages in ("auto", 1) else self._sizes[:-1]

    def _no_plan_in_time(self) -> TimeLimitError:
        return TimeLimitError(
            f"no plan that fits was found in twice time_limit_s={self.options.time_limit_s:g}",
            hint="raise time_limit_s, or search less: give stages=, mesh_shape= or manual=",
        )

    def _no_candidate(self) -> InfeasibleError:
        fits = f"fits in {format_bytes(self.budget_bytes)} per device"
        hint = "use other stages, more microbatches or devices, or raise memory_limit"
        if pins := [f"{pin.parameter}={pin}" for pin in self.options.force if pin.shards]:
            together = " together" if len(pins) > 1 else ""
            return InfeasibleError(
                f"no view of the mesh honours {', '.join(pins)}{together} and {fits}",
                hint=f"relax force; or {hint}",
            )
        n_stages = self.options.n_stages or "any number of"
        return InfeasibleError(f"no plan of {n_stages} stages {fits}", hint=hint)

    def _check_pins(self) -> None:
        stages = self.options.stages
        given = [stage.n_ranks for stage in stages] if isinstance(stages, tuple) else None
        sizes = given or self._stage_sizes
        views = distinct_views(self.mesh, self.hardware, self.options, sizes)
        check_pinned_axes(self.options, views)


def _progress(search: BranchAndBound) -> str:
    """The fastest plan so far, and what none takes less than."""
    if not search.found:
        return ""
    bound_s = search.bound_s
    least = "" if bound_s is None else f", none below {format_seconds(bound_s)}"
    return f": best so far {format_seconds(search.incumbent_s)}{least}"
