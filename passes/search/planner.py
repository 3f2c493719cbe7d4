"""The planner: which candidates are solved, in which order, and which of them is the plan.

    one stage      the placement problem on every logical view of the mesh, with the best number of
                   microbatches; and the plain recipes (data parallelism, ZeRO-3, Megatron), so that
                   by its own model the plan is never slower than they are
    more stages    the best of the joint search (`passes/inter/joint.py`), and pipeline recipes
    gaps           of single stages are closed if the plan may then win
    recompute      only if memory costs much: the same candidates again, and a joint search with it
    simulation     the candidates with the best scores; the fastest is the plan

The stages of every candidate are solved exactly. A candidate is not solved if its estimate exceeds
the best score times `PRUNE_RATIO`. Pipelines are skipped if even their lower bound exceeds the best
score and the simulated step of that candidate.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.cost.hardware import Hardware, resolve
from autopar.cost.laws import CostModel
from autopar.errors import InfeasibleError, MeshError, OptionError
from autopar.mesh import LogicalMesh, Mesh
from autopar.options import Options
from autopar.passes.analysis import Analysis, compute_dtype, microbatch_counts
from autopar.passes.inter import (
    Candidate,
    JointSearch,
    all_views,
    check_pinned_axes,
    distinct_views,
    joint_search,
    n_operators,
    recipe_candidates,
    submesh_sizes,
)
from autopar.passes.intra import Prices, least_step_s, too_little_memory
from autopar.passes.search.count_search import best_count, best_recomputed, is_worth
from autopar.passes.search.evaluator import Evaluator, Scored
from autopar.passes.search.outcome import (
    PlanningResult,
    alternatives_of,
    estimated_row,
    fastest_of,
    infeasible_row,
    pruned_row,
)
from autopar.passes.search.proposals import Proposal, Proposals
from autopar.passes.search.refined import PRUNE_RATIO, refined_candidates
from autopar.passes.search.simulator import Simulator, StepPricer
from autopar.passes.search.slower import WhySlower
from autopar.plans import Alternative, InputSignature
from autopar.units import format_bytes

# Candidates of several stages that are solved: per round of the joint search, and of recipes.
_N_SEARCHED, _N_RECIPES = 6, 3
# Skip the recompute search if memory costs less than 10%: to recompute all but matmuls costs about
# as much.
SKIP_RECOMPUTE_RATIO = 1.1
Progress = Callable[[str], None]


class _TimeUp(Exception):
    """`time_limit_s` has passed, and there is a plan."""


@dataclass(frozen=True)
class Planner:
    """Plans one captured program on one machine; `inputs` are one global batch, to count tokens."""

    analysis: Analysis
    mesh: Mesh
    options: Options
    inputs: tuple[InputSignature, ...] = ()
    report: Progress = lambda text: None
    _scored: list[Scored] = field(default_factory=list, init=False)
    _evaluated: list[Proposal] = field(default_factory=list, init=False)
    _n_configurations: list[int] = field(default_factory=list, init=False)  # of each joint search
    _prices: Prices = field(default_factory=Prices, init=False)
    _notes: list[Alternative] = field(default_factory=list, init=False)  # of what has no plan

    @cached_property
    def hardware(self) -> Hardware:
        return resolve(self.mesh, compute_dtype(self.analysis))

    @cached_property
    def pricer(self) -> StepPricer:
        on = self.analysis, self.mesh, self.hardware
        return StepPricer.of(*on, self.options.optimizer, self.inputs)

    @cached_property
    def budget_bytes(self) -> float:
        return self.options.memory_limit or self.hardware.memory_limit_bytes

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator(
            self.analysis, self.options, self.hardware, self.budget_bytes,
            all_views(self.mesh, self.hardware, self.options, self._sizes),
            tuple(microbatch_counts(self.analysis, self.options, self.mesh.n_ranks)),
            time.perf_counter() + (self.options.time_limit_s or math.inf), prices=self._prices,
        )  # fmt: skip

    @cached_property
    def _proposals(self) -> Proposals:
        on = self.analysis, self.mesh, self.hardware, self.options
        return Proposals(*on, self.budget_bytes, self._prices)

    @property
    def _sizes(self) -> list[int]:
        """Possible numbers of ranks of a stage."""
        is_one = self.options.stages == 1 or "pipeline" in self.options.forbid
        return [*([] if is_one else submesh_sizes(self.mesh)), self.mesh.n_ranks]

    def run(self) -> PlanningResult:
        """The best plan; once `time_limit_s` has passed, the best so far.

        The best so far has a `bound_s`, a lower bound on every plan.

        Raises `InfeasibleError` if nothing fits, `MeshError` or `OptionError` for more stages than
        ranks or operators.
        """
        self._check_stages()
        found, notes = self._scored, self._notes
        errors: list[tuple[InfeasibleError, Candidate]] = []
        is_timed_out, final = False, self._without_recompute
        try:
            for name, candidates in self._candidates():
                least_s = self._best_score_s
                if self._is_pruned(candidates[0]):
                    notes.append(estimated_row(name, candidates[0], least_s))
                    continue
                self._announce(f"planning {name}")
                self._evaluated.append((name, candidates))
                # The cost of a recipe is reported even if it cannot win.
                limit_s = math.inf if candidates[0].is_recipe else least_s
                # The joint search learns from solved stages, so their gaps are closed at once.
                evaluator = self._without_recompute
                if len(candidates[0].stages) == 1:
                    evaluator = evaluator.leaving_gaps
                best = best_count(evaluator, candidates, limit_s)
                if isinstance(best, Scored):
                    found.append(best)
                elif isinstance(best, InfeasibleError):
                    errors.append((best, candidates[-1]))
                    notes.append(infeasible_row(name, candidates[0].recipe, best))
                else:
                    notes.append(pruned_row(name, best, candidates[0].recipe))
            self._close_gaps()
            if not self._skips_recompute(self._best_score_s):
                final = self.evaluator
                self._add_recomputed(errors)
        except _TimeUp:
            is_timed_out = True
            passed = f"not tried when time_limit_s={self.options.time_limit_s:g} had passed"
            notes.append(Alternative("the rest", None, passed))
        if not found and not errors:
            raise self._no_candidate()
        if not found:
            raise self._nothing_fits(errors)
        self.report("simulating the best")
        if not (is_timed_out or final is self.evaluator or self._skips_recompute_simulated()):
            final = self.evaluator
            with suppress(_TimeUp):
                self._add_recomputed(errors)
        simulator = replace(self._simulator, evaluator=final)
        simulated = simulator.fastest(found)
        solved = fastest_of(found, simulated)
        bound_s = None
        if is_timed_out:  # a bound on all plans: every rank runs an equal share of every operator
            bound_s = least_step_s(self.analysis, CostModel(self._whole_view, self.evaluator.dtype))
        stats = self.evaluator.stats(sum(self._n_configurations))
        why = None if is_timed_out else WhySlower(simulator, solved, self.pricer)
        rows = (*alternatives_of(found, simulated, solved, why), *notes)
        return PlanningResult(solved, self.hardware, rows, bound_s, stats)

    @cached_property
    def _without_recompute(self) -> Evaluator:
        """The evaluator of the main search. Recompute is searched after it (`_recomputed`)."""
        return self.evaluator.without_recompute or self.evaluator

    def _close_gaps(self) -> None:
        """Close the open gaps of candidates that may then be the best."""
        tried = dict(self._evaluated)
        for scored in sorted(self._scored, key=lambda s: s.score_s):
            if scored.open_bound_s >= self._best_score_s:
                continue
            self._announce(f"closing the gap of {scored.candidate.name}")
            better = best_count(
                self._without_recompute, tried[scored.candidate.name], self._best_score_s
            )
            if isinstance(better, Scored) and better.score_s <= scored.score_s:
                self._scored[self._scored.index(scored)] = better

    @property
    def _recompute_thresholds_s(self) -> Iterator[float]:
        """For each proposal, the step time above which recompute is searched."""
        every = [candidates for _, candidates in self._evaluated]
        # Without a memory limit no recipe is faster than the search on its view.
        searched = [candidates for candidates in every if not candidates[0].is_recipe] or every
        return (SKIP_RECOMPUTE_RATIO * self._unlimited_s(candidates) for candidates in searched)

    def _skips_recompute(self, step_time_s: float) -> bool:
        """Would unlimited memory gain less than recompute costs?"""
        if self.evaluator is self._without_recompute:
            return True
        return math.isfinite(step_time_s) and all(
            step_time_s <= s for s in self._recompute_thresholds_s
        )

    def _skips_recompute_simulated(self) -> bool:
        """`_skips_recompute` for the simulated incumbent, whose peak exceeds the solver's bytes."""
        assert self._incumbent is not None, "asked where something was found"
        try:
            threshold_s = min(self._recompute_thresholds_s, default=math.inf)
            found = self._simulator.fit_to_budget(self._incumbent, threshold_s)
        except InfeasibleError:
            return False
        return not isinstance(found, float) and self._skips_recompute(found.step_time_s)

    @cached_property
    def _simulator(self) -> Simulator:
        return Simulator(self._without_recompute, self.pricer)

    def _add_recomputed(self, errors: list[tuple[InfeasibleError, Candidate]]) -> None:
        """Add candidates with recompute; each replaces the one of its name, and its rows."""
        for scored in self._recomputed():
            name = scored.candidate.name
            names = [s.candidate.name for s in self._scored]
            if name in names:  # same place: of equals the first wins
                self._scored[names.index(name)] = scored
            else:
                self._scored.append(scored)
            errors[:] = [(error, c) for error, c in errors if c.name != name]
            self._notes[:] = [note for note in self._notes if note.name != name]

    def _recomputed(self) -> Iterator[Scored]:
        """Candidates that recompute makes faster or makes fit, then a joint search with it.

        The joint search is left out if it gains too little even without a memory limit.
        """
        known = {s.candidate.name: s for s in self._scored}
        every = list(self._evaluated)
        for name, candidates in every:
            limit_s = self._best_score_s
            if candidates[0].is_recipe:
                if name in known:
                    continue
                limit_s = math.inf
            self._announce(f"planning {name} with recompute")
            better = best_recomputed(self.evaluator, candidates, limit_s)
            if better is not None:
                yield better
        stages = self.options.stages
        if isinstance(stages, tuple) or stages == 1 or self.options.manual is not None:
            return
        # Recompute saves memory, and costs time.
        if self._joint is None or not is_worth(self._joint.unlimited_s, self._best_score_s):
            return

        def kind(candidate: Candidate) -> object:
            views = tuple(layout.view for layout in candidate.stages)
            return candidate.ends, views, candidate.n_microbatches

        tried = {kind(candidate) for _, candidates in every for candidate in candidates}
        n_stages = None if stages == "auto" else int(stages)
        for candidate in _distinct_names(self._searched_stages(n_stages, self.evaluator)):
            if kind(candidate) in tried or self._is_pruned(candidate):
                continue
            named = replace(candidate, name=f"{candidate.name}, recompute")
            self._announce(f"planning {named.name}")
            try:
                yield self.evaluator.scored(named, self.budget_bytes)
            except InfeasibleError:
                continue

    def _unlimited_s(self, candidates: Sequence[Candidate]) -> float:
        """The score of the fewest microbatches without a memory limit; infinite: infeasible."""
        try:
            return self._without_recompute.scored(candidates[0], None).score_s
        except InfeasibleError:
            return math.inf

    def _nothing_fits(self, errors: Sequence[tuple[InfeasibleError, Candidate]]) -> InfeasibleError:
        """The error for the leanest candidate, with its simulated peak."""
        error, candidate = min(errors, key=lambda pair: pair[0].least_bytes or math.inf)
        if error.least_bytes is None:
            return error
        leanest = Simulator(self.evaluator, self.pricer).with_least_memory(candidate)
        return too_little_memory(self.budget_bytes, leanest.peak_bytes, candidate.name)

    def _announce(self, text: str) -> None:
        """Report what comes next; raises `_TimeUp` if the time is up and there is a plan."""
        if self._scored and time.perf_counter() > self.evaluator.deadline:
            raise _TimeUp
        self.report(text)

    @property
    def _whole_view(self) -> LogicalMesh:
        return self._proposals.views(0, self.mesh.n_ranks)[0]

    def _check_stages(self) -> None:
        """Raises `MeshError` or `OptionError` if there are more stages than ranks or operators.

        Raises `InfeasibleError` if no stage can have an axis that `force` shards over.
        """
        n_stages, n_ranks = self.options.stages, self.mesh.n_ranks
        if self.options.force and self.options.manual is None:
            self._check_pins()
        if not isinstance(n_stages, int):
            return
        if n_stages > n_ranks:
            raise MeshError(f"stages={n_stages} cannot share {n_ranks} ranks")
        n_all = n_operators(self.analysis.program)
        if n_stages > n_all:
            raise OptionError(f"{n_stages} stages of {n_all} operators")

    def _no_candidate(self) -> InfeasibleError:
        fits = f"fits in {format_bytes(self.budget_bytes)} per device"
        hint = "use other stages, more microbatches or devices, or raise memory_limit"
        if pins := [f"{pin.parameter}={pin}" for pin in self.options.force if pin.shards]:
            return InfeasibleError(
                f"no view of the mesh honours {', '.join(pins)} together and {fits}",
                hint=f"relax force; or {hint}",
            )
        return InfeasibleError(f"no plan of {self.options.stages} stages {fits}", hint=hint)

    def _check_pins(self) -> None:
        stages, sizes = self.options.stages, self._sizes
        if isinstance(stages, tuple):
            sizes = [stage.n_ranks for stage in stages]
        elif stages not in ("auto", 1):
            sizes = sizes[:-1]
        views = distinct_views(self.mesh, self.hardware, self.options, sizes)
        check_pinned_axes(self.options, views)

    def _candidates(self) -> Iterator[Proposal]:
        stages = self.options.stages
        if self.options.manual is not None:
            yield from self._proposals.manual(self.options.manual, self.report)
        elif isinstance(stages, tuple):
            yield from self._proposals.given(stages, self.evaluator)
        else:
            if stages in ("auto", 1):
                yield from self._proposals.one_stage()
            if stages != 1:
                yield from self._several_stages(None if stages == "auto" else int(stages))

    def _several_stages(self, n_stages: int | None) -> Iterator[Proposal]:
        """The best of the joint search, and the best pipeline recipes."""
        self._announce("searching for stages")
        names = list[str]()
        for candidate in _distinct_names(self._with_stages(n_stages)):
            names.append(candidate.name)
            yield candidate.name, [candidate]
        if not names and self._joint is not None:
            least_s, name = self._joint.least_step_s(n_stages), "several stages"
            is_slower = self._best_score_s < least_s < math.inf
            none = Alternative(name, None, "none found that fits")
            self._notes.append(pruned_row(name, least_s) if is_slower else none)

    def _with_stages(self, n_stages: int | None) -> Iterator[Candidate]:
        yield from self._searched_stages(n_stages, self._without_recompute)
        if n_stages is not None or self._joint is None:
            return
        if self._joint.unlimited_s <= PRUNE_RATIO * self._best_score_s:
            limit_s = min(PRUNE_RATIO * self._best_score_s, self._incumbent_simulated_s)
            for recipe in recipe_candidates(self._joint, None, _N_RECIPES, limit_s):
                if self.evaluator.stage_without_parameters(recipe.ends) is None:
                    yield recipe

    @cached_property
    def _joint(self) -> JointSearch | None:
        stages = self.options.stages
        n_stages = int(stages) if isinstance(stages, int) else None
        on = self.analysis, self.mesh, self.hardware, self.options
        return joint_search(*on, self.budget_bytes, n_stages, self._announce, self._prices)

    def _searched_stages(self, n_stages: int | None, evaluator: Evaluator) -> Iterator[Candidate]:
        """Candidates of the joint search, with recompute if the evaluator has it."""
        search = self._joint
        if search is not None and evaluator is self._without_recompute:
            search = search.without_recompute
        elif search is not None and not search.recomputes:
            search = None  # the search without recompute has found the same
        if search is None:
            return

        def score(candidate: Candidate) -> Scored | None:
            """None if the candidate does not fit or is pruned."""
            if self._is_pruned(candidate):
                return None
            try:
                return evaluator.scored(candidate, self.budget_bytes)
            except InfeasibleError:
                return None

        try:
            least_s = search.least_step_s(n_stages, self._best_score_s)
            if least_s <= self._best_score_s or least_s <= self._incumbent_simulated_s:
                yield from refined_candidates(
                    search, n_stages, _N_SEARCHED, score, lambda: PRUNE_RATIO * self._best_score_s
                )
        finally:
            self._n_configurations.append(search.n_configurations)

    @property
    def _incumbent(self) -> Scored | None:
        return min(self._scored, key=lambda s: s.score_s, default=None)

    @property
    def _best_score_s(self) -> float:
        best = self._incumbent
        return math.inf if best is None else best.score_s

    @property
    def _incumbent_simulated_s(self) -> float:
        """The simulated step of the incumbent; infinite if its peak exceeds the budget."""
        best = self._incumbent
        solved = None if best is None else self._simulator.simulated_if_fits(best)
        return math.inf if solved is None else solved.step_time_s

    def _is_pruned(self, candidate: Candidate) -> bool:
        return candidate.estimate_s > PRUNE_RATIO * self._best_score_s


def _distinct_names(candidates: Iterator[Candidate]) -> Iterator[Candidate]:
    """The candidates, with a suffix to the names of those that differ only in their cuts."""
    seen: Counter[str] = Counter()
    for candidate in candidates:
        seen[candidate.name] += 1
        nth = seen[candidate.name]
        yield candidate if nth == 1 else replace(candidate, name=f"{candidate.name}, cut {nth}")
