"""The levels of a candidate of one stage: from a bound that costs nothing to a simulated plan.

A candidate fixes the view and the number of microbatches. Its placements and what is recomputed are
open, and found level by level:

    shared      every operator in equal shares, nothing else
    free        the optimum without a memory limit
    rerun       free, and what must run again at least to fit (`passes/intra/least.py`)
    solved      the optimum within the budget without recompute; its plans are apart from here
    solved      the optimum within the budget, with a choice of recompute
    simulated   the solved placements, event by event

A simulated step may be above the bound that it was solved with, because what may be hidden is not
always; and a peak above the solver's bytes. So other placements are tried as well, its *rivals*,
whose bound stays that of all placements (`Levels.rivals`):

    lean        within less memory, until a peak fits
    ungathered  the best of those that gather nothing at each use
    gathered    the best of those that gather at each use all that is sharded
    exposed     the best if compute hid nothing

Where the free optimum fits, it is simulated at once. More microbatches allow no other placements
and cost more time, so the free bound of m microbatches bounds every multiple of m.

The bounds are those of the stage's solver (`passes/intra`): its objective is one on the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.errors import InfeasibleError
from autopar.passes.inter import Candidate
from autopar.passes.search.branch_bound import Node
from autopar.passes.search.evaluator import Evaluator, Proposal
from autopar.passes.search.simplicity import Simplicity
from autopar.passes.search.simulator import Simulator, Solved
from autopar.passes.solvers.problem import within

# Placements whose simulated step is further above the bound (relative) get rivals. With less, large
# models are solved again for nothing; with more, small ones lose plans (`test_exhaustive.py`).
RIVAL_REL = 0.02
Parts = Sequence[Node | Solved]


@dataclass(eq=False)
class Levels:
    """Makes the nodes of candidates. `errors` are of candidates that do not fit."""

    simulator: Simulator
    errors: list[tuple[InfeasibleError, Candidate]] = field(default_factory=list)
    # Name of the candidates, microbatches -> the free bound.
    _free_s: dict[tuple[str, int], float] = field(default_factory=dict)

    @property
    def _whole(self) -> Evaluator:
        """With a choice of recompute, if there is one."""
        return self.simulator.evaluator

    @property
    def _plain(self) -> Evaluator:
        """Without recompute, unless the user chose it."""
        return self._whole.plain_evaluator or self._whole

    def root(self, candidate: Candidate, shared_s: float) -> Node:
        """A candidate of which only the bound of all is known."""
        simplest = Simplicity.searched_on(candidate)
        node = Node(candidate.name, shared_s, simplest, "shared", None)
        return replace(node, refine=partial(self._free, node, candidate))

    def _free(self, node: Node, candidate: Candidate, limit_s: float) -> Parts:
        bound_s = max(
            (s for (name, m), s in self._free_s.items()
             if name == node.name and candidate.n_microbatches % m == 0),
            default=0.0,
        )  # fmt: skip
        again = partial(self._free, node, candidate)
        if bound_s >= limit_s > node.bound_s:
            return [node.after(node.level, bound_s, again)]
        try:
            free = self._plain.placed(candidate, None, limit_s)
        except InfeasibleError as error:
            return self.impossible(error, candidate)
        bound_s = max(free.bound_s, node.bound_s)
        if bound_s >= limit_s > node.bound_s:
            return [node.after("free", bound_s, again)]
        self._free_s[node.name, candidate.n_microbatches] = bound_s
        known = node.after("free", bound_s, None)
        if within(self._plain.budget_bytes, free.size_bytes):
            return [self._leaf(known, free, self._plain)]
        if self._plain is self._whole:
            return [replace(known, refine=partial(self._solve, self._whole, known, candidate))]
        rerun = node.after("rerun", max(bound_s, self._rerun_s(free, candidate)), None)
        return [replace(rerun, refine=partial(self._divide, rerun, candidate))]

    def _divide(self, node: Node, candidate: Candidate, limit_s: float) -> Parts:
        """The plans without recompute, solved; and all plans."""
        every = replace(node, refine=partial(self._solve, self._whole, node, candidate))
        return [*self._solve(self._plain, node, candidate, limit_s), every]

    def _solve(
        self, evaluator: Evaluator, node: Node, candidate: Candidate, limit_s: float
    ) -> Parts:
        """Within the budget."""
        try:
            placed = evaluator.placed(candidate, evaluator.budget_bytes, limit_s)
        except InfeasibleError as error:
            return self.impossible(error, candidate)
        bound_s = max(placed.bound_s, node.bound_s)
        if bound_s >= limit_s > node.bound_s:
            refine = partial(self._solve, evaluator, node, candidate)
            return [node.after("solved", bound_s, refine)]
        return [self._leaf(node.after("solved", bound_s, None), placed, evaluator)]

    def _leaf(
        self,
        node: Node,
        placed: Proposal,
        solver: Evaluator | None,
        leaner: Evaluator | None = None,
        rival_of: Candidate | None = None,
    ) -> Node:
        """A node that simulates solved placements; `leaner` finds ones that need less memory.

        After that, the `solver` finds their rivals; None: these are some, of a candidate that
        forbids less.
        """
        return _Leaf(self, node, placed, solver, leaner, rival_of or placed.candidate).solved_node

    def rivals(self, node: Node, placed: Proposal, solver: Evaluator, fits: bool) -> Iterator[Node]:
        """Alternatives to the placements of one stage that gather less, or assume less overlap.

        Their bound stays that of all placements: those that are left out may be faster.
        """
        candidate = placed.candidate
        gathered = {of.period == "use" for of in placed.choices[0].strategy.storage.values()}
        if True in gathered or not fits:
            yield self._rival(node, "ungathered", candidate, ("zero3",), solver, self._whole)
        if len(gathered) == 2 or not fits:
            words = "zero1", "zero2"
            yield self._rival(node, "gathered", candidate, words, solver, self._whole)
        exposed = solver.exposed_evaluator, self._whole.exposed_evaluator
        yield self._rival(node, "exposed", candidate, (), *exposed)

    def _rival(
        self, node: Node, level: str, candidate: Candidate, forbid: Sequence[str],
        solver: Evaluator, leaner: Evaluator,
    ) -> Node:  # fmt: skip
        rival = replace(node.after(level, node.bound_s, None), is_rival=True)
        forbidding = candidate.restrict(*forbid)
        refine = partial(self._solve_rival, rival, candidate, forbidding, solver, leaner)
        return replace(rival, refine=refine)

    def _solve_rival(
        self, rival: Node, candidate: Candidate, forbidding: Candidate, solver: Evaluator,
        leaner: Evaluator, limit_s: float,
    ) -> Parts:  # fmt: skip
        # Where nothing is hidden, the solver's bound is none on the step.
        within_s = limit_s if solver.hides else math.inf
        try:
            found = solver.placed(forbidding, solver.budget_bytes, within_s)
        except InfeasibleError as error:
            return self.impossible(error, candidate)
        (chosen,) = found.choices
        if chosen.bound_s >= within_s:
            again = partial(self._solve_rival, rival, candidate, forbidding, solver, leaner)
            return [replace(rival, refine=again, given_up_s=chosen.bound_s)]
        gap = max(0.0, 1 - rival.bound_s / chosen.objective_s)
        found = replace(found, choices=(replace(chosen, gap=gap),))
        return [self._leaf(rival, found, None, leaner, candidate)]

    def _rerun_s(self, least: Proposal, candidate: Candidate) -> float:
        """A bound with what must run again at least; `least` is the optimum if nothing did."""
        return least.choices[0].hidden_bound_s + self._whole.least_rerun_s(candidate)

    def impossible(self, error: InfeasibleError, candidate: Candidate) -> Parts:
        """Nothing of a candidate fits, or is allowed."""
        # Its traceback would keep the frames of the search, and all that they hold.
        self.errors.append((error.with_traceback(None), candidate))
        return []


@dataclass(frozen=True)
class _Leaf:
    """Solved placements that are simulated; the arguments are those of `Levels._leaf`.

    Its nodes know it, and it knows none of them: a cycle would outlive the search.
    """

    levels: Levels
    node: Node
    placed: Proposal
    solver: Evaluator | None
    leaner: Evaluator | None
    candidate: Candidate

    @property
    def solved_node(self) -> Node:
        return replace(self.node, refine=self.simulated, placed=self.placed)

    @property
    def _simulator(self) -> Simulator:
        simulator = self.levels.simulator
        return simulator.on(self.leaner or simulator.evaluator)

    @property
    def _unsolved(self) -> Sequence[Node]:
        """The node stays for its bound, unless its plans are another's."""
        node = self.node
        return () if self.solver is None else (node.after("simulated", node.bound_s, None),)

    @property
    def _lean_node(self) -> Node:
        return replace(self.solved_node, refine=self.lean, is_rival=True)

    def simulated(self, limit_s: float) -> Parts:
        # Farther above the bound, rivals may be below the limit.
        if limit_s <= self.placed.least_s <= self.node.bound_s * (1 + RIVAL_REL):
            return [replace(self.solved_node, given_up_s=self.placed.least_s)]
        solved = self._simulator.simulate_if_fits(self.placed)
        if solved is None:
            return [*self._unsolved, self._lean_node]
        return [
            *self._unsolved,
            replace(solved, candidate=self.candidate),
            *self._rivals(solved),
        ]

    def lean(self, limit_s: float) -> Parts:
        """The simulated peak exceeds the budget: leaner placements are found."""
        try:
            found = self._simulator.fit_to_budget(self.placed, limit_s)
        except InfeasibleError as error:
            return [*self.levels.impossible(error, self.placed.candidate), *self._rivals(None)]
        if isinstance(found, Solved):
            return [replace(found, candidate=self.candidate), *self._rivals(found)]
        return [replace(self._lean_node, given_up_s=found)]

    def _rivals(self, found: Solved | None) -> Iterator[Node]:
        if self.solver is None:
            return
        if found is None or found.step_time_s > self.node.bound_s * (1 + RIVAL_REL):
            simulator = self._simulator
            peak_bytes = simulator.simulate_once(self.placed).peak_bytes
            fits = within(self.levels.simulator.evaluator.budget_bytes, peak_bytes)
            yield from self.levels.rivals(self.node, self.placed, self.solver, fits)
