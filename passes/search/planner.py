"""The planner: candidate plans, priced alike; the best one wins.

    one stage     for every logical view of the mesh, the intra-operator problem, with the
                  best number of microbatches; and the plain recipes (data parallelism,
                  ZeRO-3, Megatron), so that the result is never worse than they are by its
                  own model
    more stages   the best of the joint search (`joint.py`) and the recipes with stages
    recompute     where memory costs much: the same once more, what may be faster with it

Every candidate's stages are solved exactly; the most promising are simulated (`simulated.py`).
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
    joint_search,
    n_operators,
    recipe_candidates,
    submesh_sizes,
)
from autopar.passes.intra import least_step_s, too_little_memory
from autopar.passes.search.count_search import best_count, best_recomputed
from autopar.passes.search.evaluator import Evaluator, Scored
from autopar.passes.search.outcome import (
    PlanningResult,
    at_least,
    fastest_of,
    rows_of,
    without_plan,
)
from autopar.passes.search.pricer import StepPricer
from autopar.passes.search.proposals import Proposal, Proposals
from autopar.passes.search.refined import HOPELESS, refined_candidates
from autopar.passes.search.simulator import Simulator
from autopar.plans import Alternative, InputSignature
from autopar.units import format_bytes, format_seconds

# Candidates of several stages that are solved: of the search, of recipes.
_N_SEARCHED, _N_RECIPES = 6, 3
# What memory costs, at most, where recompute is left alone: to run all but products again takes
# about as long.
MEMORY_COSTS = 1.1
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
    _found: list[Scored] = field(default_factory=list, init=False)
    _tried: list[Proposal] = field(default_factory=list, init=False)
    _n_configurations: list[int] = field(default_factory=list, init=False)  # of each joint search
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
            time.perf_counter() + (self.options.time_limit_s or math.inf),
        )  # fmt: skip

    @cached_property
    def _proposals(self) -> Proposals:
        on = self.analysis, self.mesh, self.hardware, self.options
        return Proposals(*on, self.budget_bytes)

    @property
    def _sizes(self) -> list[int]:
        """Numbers of devices of a stage, or of the one there is."""
        is_one = self.options.stages == 1 or "pipeline" in self.options.forbid
        return [*([] if is_one else submesh_sizes(self.mesh)), self.mesh.n_ranks]

    def run(self) -> PlanningResult:
        """The best plan.

        When `time_limit_s` has passed and there is one, the best so far; its gap is then to what
        no plan can be faster than.

        Raises `InfeasibleError` when nothing fits, `MeshError` or `OptionError` for more stages
        than ranks or operators.
        """
        self._check_stages()
        try:
            return self._best()
        finally:
            self.analysis.priced.clear()

    def _best(self) -> PlanningResult:
        found, notes = self._found, self._notes
        errors: list[tuple[InfeasibleError, Candidate]] = []
        is_stopped, last = False, self._plain
        try:
            for name, tries in self._candidates():
                least_s = self._least_s
                if self._is_hopeless(tries[0]):
                    about = format_seconds(tries[0].estimate_s)
                    notes.append(Alternative(name, None, f"about {about}, not solved"))
                    continue
                self._tell(f"planning {name}")
                self._tried.append((name, tries))
                # What a recipe costs is worth knowing even where it cannot win.
                limit_s = math.inf if tries[0].is_recipe else least_s
                # What stages take is learned from, so theirs are settled at once.
                is_one = len(tries[0].stages) == 1
                best = best_count(self._plain.hasty if is_one else self._plain, tries, limit_s)
                if isinstance(best, Scored):
                    found.append(best)
                elif isinstance(best, InfeasibleError):
                    errors.append((best, tries[-1]))
                    notes.append(without_plan(name, best))
                else:
                    notes.append(at_least(name, best))
            self._settle()
            if not self._costs_little(self._least_s):
                last = self.evaluator
                self._add_recomputed(errors)
        except _TimeUp:
            is_stopped = True
            passed = f"not tried when time_limit_s={self.options.time_limit_s:g} had passed"
            notes.append(Alternative("the rest", None, passed))
        if not found and not errors:
            raise InfeasibleError(
                f"no plan of {self.options.stages} stages fits in "
                f"{format_bytes(self.budget_bytes)} per device",
                hint="use other stages, more microbatches or devices, or raise memory_limit",
            )
        if not found:
            raise self._nothing_fits(errors)
        self.report("simulating the best")
        if not (is_stopped or last is self.evaluator or self._fits_for_little()):
            last = self.evaluator
            with suppress(_TimeUp):
                self._add_recomputed(errors)
        simulated = replace(self._simulator, evaluator=last).fastest(found)
        solved = fastest_of(found, simulated)
        if is_stopped:  # nothing is known of what was not tried but that it is no faster than this
            least_s = least_step_s(self.analysis, CostModel(self._whole, self.evaluator.dtype))
            solved = replace(solved, gap=max(solved.gap, 1 - least_s / solved.objective_s))
        stats = self.evaluator.stats(sum(self._n_configurations))
        rows = (*rows_of(found, simulated), *notes)
        return PlanningResult(solved, self.hardware, rows, stats)

    @cached_property
    def _plain(self) -> Evaluator:
        """Without recompute, as far as it is searched: it comes after all else (`_recomputed`)."""
        return self.evaluator.without_recompute or self.evaluator

    def _settle(self) -> None:
        """Close the gaps of what may be the best then: of other plans they are not worth it."""
        tried = dict(self._tried)
        for scored in sorted(self._found, key=lambda s: s.score_s):
            if scored.open_s >= self._least_s:
                continue
            self._tell(f"closing the gap of {scored.candidate.name}")
            better = best_count(self._plain, tried[scored.candidate.name], self._least_s)
            if isinstance(better, Scored) and better.score_s <= scored.score_s:
                self._found[self._found.index(scored)] = better

    @property
    def _enough_s(self) -> Iterator[float]:
        """Of everything tried, what it takes if memory had no limit, and what memory may cost."""
        every = [tries for _, tries in self._tried]
        # Without a limit no recipe is faster than the search on its view.
        searched = [tries for tries in every if not tries[0].is_recipe] or every
        return (MEMORY_COSTS * self._free_s(tries) for tries in searched)

    def _costs_little(self, step_time_s: float) -> bool:
        """Is recompute left alone: would devices without a limit gain less than it costs?"""
        if self.evaluator is self._plain:
            return True
        return math.isfinite(step_time_s) and all(step_time_s <= s for s in self._enough_s)

    def _fits_for_little(self) -> bool:
        """The same of the best by its score, simulated: peaks are above what was solved for."""
        assert self._best_scored is not None, "asked where something was found"
        try:
            enough_s = min(self._enough_s, default=math.inf)
            found = self._simulator.fitting(self._best_scored, enough_s)
        except InfeasibleError:
            return False
        return not isinstance(found, float) and self._costs_little(found.step_time_s)

    @cached_property
    def _simulator(self) -> Simulator:
        return Simulator(self._plain, self.pricer)

    def _add_recomputed(self, errors: list[tuple[InfeasibleError, Candidate]]) -> None:
        """Put what recompute betters in its place."""
        for scored in self._recomputed():
            name = scored.candidate.name
            place = [s.candidate.name for s in self._found]
            if name in place:  # of equals the first wins
                self._found[place.index(name)] = scored
            else:
                self._found.append(scored)
            errors[:] = [(error, c) for error, c in errors if c.name != name]
            self._notes[:] = [note for note in self._notes if note.name != name]

    def _recomputed(self) -> Iterator[Scored]:
        """What is faster, or fits at all, with recompute: of what was tried, and of a search for
        stages that knows of it."""
        known = {s.candidate.name: s for s in self._found}
        every = list(self._tried)
        for name, tries in every:
            limit_s = self._least_s
            if tries[0].is_recipe:
                if name in known:
                    continue
                limit_s = math.inf
            self._tell(f"planning {name} with recompute")
            better = best_recomputed(self.evaluator, tries, limit_s)
            if better is not None:
                yield better
        stages = self.options.stages
        if isinstance(stages, tuple) or stages == 1 or self.options.manual is not None:
            return

        def kind(candidate: Candidate) -> object:
            views = tuple(layout.view for layout in candidate.stages)
            return candidate.ends, views, candidate.n_microbatches

        tried = {kind(candidate) for _, tries in every for candidate in tries}
        n_stages = None if stages == "auto" else int(stages)
        for candidate in _told_apart(self._searched_stages(n_stages, self.evaluator)):
            if kind(candidate) in tried or self._is_hopeless(candidate):
                continue
            named = replace(candidate, name=f"{candidate.name}, recompute")
            self._tell(f"planning {named.name}")
            try:
                yield self.evaluator.scored(named, self.budget_bytes)
            except InfeasibleError:
                continue

    def _free_s(self, tries: Sequence[Candidate]) -> float:
        """A step with the fewest microbatches, had devices no limit; infinite: there is none."""
        try:  # which of equals it is does not matter
            return self._plain.scored(tries[0], None, limit_s=0.0).score_s
        except InfeasibleError:
            return math.inf

    def _nothing_fits(self, errors: Sequence[tuple[InfeasibleError, Candidate]]) -> InfeasibleError:
        """What the leanest of all needs while it runs."""
        error, candidate = min(errors, key=lambda pair: pair[0].least_bytes or math.inf)
        if error.least_bytes is None:
            return error
        leanest = Simulator(self.evaluator, self.pricer).leanest(candidate)
        return too_little_memory(self.budget_bytes, leanest.peak_bytes, candidate.name)

    def _tell(self, text: str) -> None:
        """Say what comes next, unless the time is up and there is a plan to return."""
        if self._found and time.perf_counter() > self.evaluator.deadline:
            raise _TimeUp
        self.report(text)

    @property
    def _whole(self) -> LogicalMesh:
        return self._proposals.views(0, self.mesh.n_ranks)[0]

    def _check_stages(self) -> None:
        """Raises `MeshError` or `OptionError` where so many stages cannot be."""
        n_stages, n_ranks = self.options.stages, self.mesh.n_ranks
        if not isinstance(n_stages, int):
            return
        if n_stages > n_ranks:
            raise MeshError(f"stages={n_stages} cannot share {n_ranks} ranks")
        n_all = n_operators(self.analysis.program)
        if n_stages > n_all:
            raise OptionError(f"{n_stages} stages of {n_all} operators")

    # -- candidates --------------------------------------------------------------------------

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
                yield from self._stages(None if stages == "auto" else int(stages))

    def _stages(self, n_stages: int | None) -> Iterator[Proposal]:
        """The best of the joint search, and the best recipes of several stages."""
        self._tell("searching for stages")
        names = list[str]()
        for candidate in _told_apart(self._with_stages(n_stages)):
            names.append(candidate.name)
            yield candidate.name, [candidate]
        if not names and self._joint is not None:
            least_s, name = self._joint.least_step_s(n_stages), "several stages"
            is_slower = self._least_s < least_s < math.inf
            none = Alternative(name, None, "none found that fits")
            self._notes.append(at_least(name, least_s) if is_slower else none)

    def _with_stages(self, n_stages: int | None) -> Iterator[Candidate]:
        yield from self._searched_stages(n_stages, self._plain)
        if n_stages is not None or self._joint is None:
            return
        if self._joint.free_s <= HOPELESS * self._least_s:
            limit_s = min(HOPELESS * self._least_s, self._simulated_s)
            for recipe in recipe_candidates(self._joint, None, _N_RECIPES, limit_s):
                if self.evaluator.stage_without_parameters(recipe.ends) is None:
                    yield recipe

    @cached_property
    def _joint(self) -> JointSearch | None:
        stages = self.options.stages
        n_stages = int(stages) if isinstance(stages, int) else None
        on = self.analysis, self.mesh, self.hardware, self.options
        return joint_search(*on, self.budget_bytes, n_stages, self._tell)

    def _searched_stages(self, n_stages: int | None, evaluator: Evaluator) -> Iterator[Candidate]:
        """By the joint search, with what an evaluator may choose from."""
        search = self._joint
        if search is not None and evaluator is self._plain:
            search = search.without_recompute
        elif search is not None and not search.recomputes:
            search = None  # nothing that is not known
        if search is None:
            return

        def score(candidate: Candidate) -> Scored | None:
            """None where it does not fit, or was not worth solving."""
            if self._is_hopeless(candidate):
                return None
            try:
                return evaluator.scored(candidate, self.budget_bytes)
            except InfeasibleError:
                return None

        try:
            least_s = search.least_step_s(n_stages, self._least_s)
            if least_s <= self._least_s or least_s <= self._simulated_s:
                yield from refined_candidates(
                    search, n_stages, _N_SEARCHED, score, lambda: HOPELESS * self._least_s
                )
        finally:
            self._n_configurations.append(search.n_configurations)

    @property
    def _best_scored(self) -> Scored | None:
        return min(self._found, key=lambda s: s.score_s, default=None)

    @property
    def _least_s(self) -> float:
        best = self._best_scored
        return math.inf if best is None else best.score_s

    @property
    def _simulated_s(self) -> float:
        """A step of the best by its score, simulated; infinite where that does not fit."""
        best = self._best_scored
        solved = None if best is None else self._simulator.as_it_is(best)
        return math.inf if solved is None else solved.step_time_s

    def _is_hopeless(self, candidate: Candidate) -> bool:
        return candidate.estimate_s > HOPELESS * self._least_s


def _told_apart(candidates: Iterator[Candidate]) -> Iterator[Candidate]:
    """Those that differ in their cuts alone under names of their own."""
    seen: Counter[str] = Counter()
    for candidate in candidates:
        seen[candidate.name] += 1
        nth = seen[candidate.name]
        yield candidate if nth == 1 else replace(candidate, name=f"{candidate.name}, cut {nth}")
