"""The levels of a candidate: from a bound that costs nothing to a simulated plan.

A candidate fixes the stages, the view of each, and the number of microbatches. Its placements and
what is recomputed are open, and found level by level:

    shared      every operator in equal shares, nothing else            a bound of all candidates
    free        the optimum without a memory limit                      bounds all of the candidate
    solved      the optimum within the budget, without recompute
    weightless  as if activations needed no bytes                       bounds what recomputes
    recomputed  the optimum within the budget, with a choice of recompute
    gap         a wide gap that repeated blocks leave is closed
    simulated   the solved placements, event by event

Where the free optimum fits, it is simulated at once. More microbatches allow no other placements
and cost more time, so the free bound of m microbatches bounds every multiple of m.

The bounds are those of one stage's solver (`passes/intra`), and hold for its objective. Those of
several stages stay on the level "shared".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError
from autopar.passes.inter import Candidate
from autopar.passes.search.branch_bound import Node
from autopar.passes.search.evaluator import Evaluator, Scored
from autopar.passes.search.simplicity import Simplicity
from autopar.passes.search.simulator import Simulator, Solved
from autopar.passes.solvers.problem import within

Parts = Sequence[Node | Solved]


@dataclass(eq=False)
class Levels:
    """Makes the nodes of candidates. `errors` are of candidates that do not fit."""

    simulator: Simulator
    errors: list[tuple[InfeasibleError, Candidate]] = field(default_factory=list)
    # Name of the candidates, microbatches -> the free bound.
    _free_s: dict[tuple[str, int], float] = field(default_factory=dict)

    @property
    def _searches_recompute(self) -> bool:
        return self.simulator.evaluator.without_recompute is not None

    @property
    def _plain(self) -> Evaluator:
        """Without recompute, unless the user chose it."""
        return self.simulator.evaluator.without_recompute or self.simulator.evaluator

    def root(self, candidate: Candidate, shared_s: float) -> Node:
        """A candidate of which only the bound of all is known.

        A plan that leaves an axis of a view idle is not looked for as a simpler one.
        """
        n_axes = max(len(layout.view.active_axes) for layout in candidate.stages)
        n_stages = len(candidate.stages)
        simplest = Simplicity(1, n_axes + (n_stages > 1), stages=n_stages)
        node = Node(candidate.name, shared_s, simplest, "shared", None)
        return replace(node, refine=lambda limit_s: self._free(node, candidate, limit_s))

    def _free(self, node: Node, candidate: Candidate, limit_s: float) -> Parts:
        bound_s = max(
            (s for (name, m), s in self._free_s.items()
             if name == node.name and candidate.n_microbatches % m == 0),
            default=0.0,
        )  # fmt: skip
        if bound_s >= limit_s > node.bound_s:
            return [node.after(node.level, bound_s, node.refine)]
        try:
            free = self._plain.leaving_gaps.scored(candidate, None, limit_s)
        except InfeasibleError as error:
            return self._impossible(error, candidate)
        bound_s = self._bound_s(free, node)
        if bound_s >= limit_s > node.bound_s:
            return [node.after("free", bound_s, node.refine)]
        self._free_s[node.name, candidate.n_microbatches] = bound_s
        known = node.after("free", bound_s, None)
        if within(self._plain.budget_bytes, free.size_bytes):
            return self._placed(known, free, self._plain)
        solved = known.after(
            "free", bound_s, lambda limit_s: self._solved(known, candidate, self._plain, limit_s)
        )
        return [solved, *self._recomputing(known, candidate)]

    def _recomputing(self, node: Node, candidate: Candidate) -> Parts:
        """The plans of a candidate that run operators again."""
        if not self._searches_recompute:
            return []
        simplest = node.simplest._replace(recomputes=1)
        other = replace(node, simplest=simplest)
        return [replace(other, refine=lambda limit_s: self._weightless(other, candidate, limit_s))]

    def _weightless(self, node: Node, candidate: Candidate, limit_s: float) -> Parts:
        whole = self.simulator.evaluator
        try:
            least = whole.without_activations(candidate, limit_s)
        except InfeasibleError as error:
            return self._impossible(error, candidate)
        bound_s = self._bound_s(least, node)
        if bound_s >= limit_s > node.bound_s:
            return [node.after("weightless", bound_s, node.refine)]
        known = node.after("weightless", bound_s, None)
        return [
            replace(known, refine=lambda limit_s: self._solved(known, candidate, whole, limit_s))
        ]

    def _solved(
        self, node: Node, candidate: Candidate, evaluator: Evaluator, limit_s: float
    ) -> Parts:
        """Within the budget; if gaps are left open, they are closed on another level."""
        budget_bytes = evaluator.budget_bytes
        level = "solved" if evaluator is self._plain else "recomputed"
        try:
            scored = evaluator.leaving_gaps.scored(candidate, budget_bytes, limit_s)
        except InfeasibleError as error:
            return self._impossible(error, candidate)
        bound_s = self._bound_s(scored, node)
        if bound_s >= limit_s > node.bound_s:
            return [node.after(level, bound_s, node.refine)]
        placed = self._placed(node.after(level, bound_s, None), scored, evaluator)
        if all(chosen.settled for chosen in scored.choices):
            return placed

        def close(limit_s: float) -> Parts:
            closed = evaluator.scored(candidate, budget_bytes, limit_s)
            after = node.after("gap", self._bound_s(closed, node), None)
            return self._placed(after, closed, evaluator)

        return [*placed, node.after(level, bound_s, close)]

    def _placed(self, node: Node, scored: Scored, evaluator: Evaluator) -> Parts:
        """Solved placements, which are left to simulate."""
        simulator = self.simulator.on(evaluator)

        def simulate(_: float) -> Parts:
            solved = simulator.simulated_if_fits(scored)
            done = node.after("simulated", node.bound_s, None)
            if solved is not None:
                return [done, solved]
            left = replace(done, level=node.level, refine=lean, is_solved=True)
            if evaluator is self._plain:
                return [left, *self._recomputing(node, scored.candidate)]
            return [left]

        def lean(limit_s: float) -> Parts:
            """The simulated peak exceeds the budget: leaner placements are found."""
            try:
                found = simulator.fit_to_budget(scored, limit_s)
            except InfeasibleError as error:
                return self._impossible(error, scored.candidate)
            if isinstance(found, Solved):
                return [node.after("simulated", node.bound_s, None), found]
            return [replace(node.after(node.level, found, lean), is_solved=True)]

        return [replace(node, refine=simulate, is_solved=True, scored=scored)]

    def _bound_s(self, scored: Scored, node: Node) -> float:
        """The solver's bound of a single stage; else the node's."""
        if len(scored.choices) > 1:
            return node.bound_s
        return max(node.bound_s, scored.choices[0].bound_s)

    def _impossible(self, error: InfeasibleError, candidate: Candidate) -> Parts:
        self.errors.append((error, candidate))
        return []
