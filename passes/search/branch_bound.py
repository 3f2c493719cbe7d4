"""Best-first branch and bound over plans: the algorithm of the search.

    open nodes = all plans, in a few nodes
    while the bound of an open node < incumbent x (1 - tolerance):
        refine the one with the least bound: into nodes with tighter bounds, and simulated plans

A *node* is a set of plans, and its `bound_s` is a lower bound on the step of each. The *incumbent*
is the fastest plan simulated so far. So when the loop ends, no plan is faster than the incumbent by
more than the tolerance, if the bounds hold. Left out are nodes that nothing refines further, and
those that were given up; `BranchAndBound.bound_s` counts them. The order in which nodes are
proposed does not matter. Of bounds that are equal to the tolerance, a solved plan is first, because
it may end the search. Bounds of some families of plans are further below their steps than those of
others. So a name whose nodes were refined `_MOST_IN_A_ROW` times without a faster plan lets the
next name have a turn: an incumbent found early rules out more.

The *simplest* plan within `tie` of the incumbent is chosen, because predictions are off by more
than that (`simplicity.py`). A node that may hold a simpler plan within the tie is refined, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from autopar.identity import Same
from autopar.passes.search.evaluator import Proposal
from autopar.passes.search.simplicity import Simplicity
from autopar.passes.search.simulator import Solved
from autopar.passes.solvers.problem import TimeLimitError

# Nodes of one name that are refined in a row, without a faster plan, before another has a turn.
_MOST_IN_A_ROW = 8
# So far above the least bound (relative), the incumbent is worth a dive: of so many refinements
# without a faster plan, the last ones refine what is nearest to a plan, not what has the least
# bound. A dive of one stage ends after four: what runs again, two solved, one simulated.
# Recipes are worth one if it is further still.
_DIVES_REL, _RECIPES_REL, _DIVES_EVERY, _DIVE_LENGTH = 0.05, 0.5, 24, 4
# Levels on the way to a plan.
_DEPTHS = {"free": 1, "rerun": 2, "solved": 3}
# Of a node whose solver gave up.
NOT_IN_TIME = "no placements found in time"


@dataclass(frozen=True, eq=False)
class Node:
    """Plans that are not told apart yet.

    name        what they have in common, as a user reads it
    bound_s     none of them takes less, in seconds of a step
    simplest    no plan is looked for in it because it may be simpler than this
    level       what the bound was computed from
    refine      given seconds: nodes and plans that this node is divided into. What cannot be below
                these seconds may come back as a node with that bound. None: nothing more is known
    placed      its placements, if they are solved
    recipe      the plain recipe that makes its plans
    is_rival    its plans are some of another node, looked for in another way
    note        what is said of it instead of its bound
    row         its name among the alternatives, until its placements are solved; else its name
    given_up_s  heuristic floor, not a bound: refining found nothing faster than these seconds
    is_silent   it is no row among the alternatives
    """

    name: str
    bound_s: float
    simplest: Simplicity
    level: str
    refine: Callable[[float], Sequence[Node | Solved]] | None
    placed: Proposal | None = None
    recipe: str = ""
    is_rival: bool = False
    note: str = ""
    row: str = ""
    given_up_s: float = 0.0
    is_silent: bool = False

    @property
    def turn(self) -> tuple[float, str, str]:
        """Nodes are refined in this order."""
        return self.least_s, self.name, self.level

    @property
    def depth(self) -> int:
        """How near it is to a plan."""
        return _DEPTHS.get(self.level, 0)

    @property
    def row_name(self) -> str:
        return self.row if self.row and self.placed is None else self.name

    @property
    def is_part(self) -> bool:
        """Are its plans in other nodes, too?"""
        return self.is_rival or bool(self.recipe)

    @property
    def least_s(self) -> float:
        """Refining finds no plan below these seconds."""
        return max(self.bound_s, self.given_up_s)

    def is_far(self, most_s: float) -> bool:
        """Is it open, above these seconds, and without placements?"""
        return self.refine is not None and self.placed is None and self.least_s > most_s

    def after(
        self, level: str, bound_s: float, refine: Callable[[float], Sequence[Node | Solved]] | None
    ) -> Node:
        """The node's plans on another level; a bound once proved stays."""
        return replace(self, level=level, bound_s=max(bound_s, self.bound_s), refine=refine)


@dataclass
class BranchAndBound:
    """The search. `found` are simulated plans, `nodes` what was ruled out or is still open.

    tolerance, tie   relative; both as in `Options`
    rank             how simple a simulated plan is
    before           called before each refinement, with the search; may raise to end the search,
                     as refining may
    """

    tolerance: float
    tie: float
    rank: Callable[[Solved], Simplicity]
    before: Callable[[Node, BranchAndBound], None] = lambda node, search: None
    found: list[Solved] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    unsolved: list[TimeLimitError] = field(default_factory=list)
    _ranks: dict[Same, Simplicity] = field(default_factory=dict)
    _row: _Row = field(default_factory=lambda: _Row())

    def run(self, roots: Iterable[Node], most_s: float = math.inf) -> list[Node]:
        """Refine until no node may hold a plan that matters.

        Open nodes above `most_s` without placements are not refined. They are given back, for a
        later run.
        """
        self.nodes.extend(roots)
        while (work := self._next(most_s)) is not None:
            node, limit_s = work
            self.before(node, self)
            self._row.add(node.name, self.incumbent_s)
            assert node.refine is not None, "only such nodes are next"
            parts: list[Node | Solved]
            try:
                parts = list(node.refine(limit_s))
            except TimeLimitError as error:  # its solver gave up: it stays for its bound
                self.unsolved.append(error)
                parts = [replace(node, refine=None, note=NOT_IN_TIME)]
            self.nodes.remove(node)  # not before: refining may raise to end the search
            for part in parts:
                if isinstance(part, Solved):
                    self.found.append(part)
                else:
                    self.nodes.append(part)
        far = [node for node in self.nodes if node.is_far(most_s)]
        self.nodes = [node for node in self.nodes if not node.is_far(most_s)]
        return far

    @property
    def incumbent_s(self) -> float:
        """Seconds of the fastest plan so far; infinite before there is one."""
        return min((solved.step_time_s for solved in self.found), default=math.inf)

    @property
    def bound_s(self) -> float | None:
        """Lower bound on every plan's step; None if there are recipes alone."""
        bounds = [node.bound_s for node in self.nodes if not node.is_part]
        return min(*bounds, self.incumbent_s) if bounds else None

    @property
    def ruled_out(self) -> dict[str, int]:
        """Level -> how many nodes got no further, most first; none whose plans are in others."""
        levels = Counter(node.level for node in self.nodes if not node.is_part)
        return dict(sorted(levels.items(), key=lambda item: (-item[1], item[0])))

    @property
    def chosen(self) -> Solved:
        """The simplest plan within the tie; of equally simple ones the fastest."""
        near = [s for s in self.found if s.step_time_s <= self.incumbent_s * (1 + self.tie)]
        return min(near, key=lambda s: (self._rank(s), s.step_time_s, s.candidate.name, s.gap))

    def _next(self, most_s: float) -> tuple[Node, float] | None:
        """The node to refine next, and the seconds that its plans must be below to matter."""
        able = [n for n in self.nodes if n.refine is not None and not n.is_far(most_s)]
        able.sort(key=lambda node: node.turn)
        faster = [node for node in able if node.least_s < self._worth_s(node)]
        if faster:
            if (dive := self._dive(faster)) is not None:
                return dive, self._worth_s(dive)
            faster = self._row.next_names(faster)
            # A solved plan may become the incumbent, and may end the search.
            alike_s = faster[0].turn[0] * (1 + self.tolerance)
            solved = (n for n in faster if n.placed is not None and n.least_s < alike_s)
            node = next(solved, faster[0])
            return node, self._worth_s(node)
        if not self.found or not self.tie:
            return None
        near_s, simplicity = self.incumbent_s * (1 + self.tie), self._rank(self.chosen)
        simpler = [n for n in able if n.least_s < near_s and n.simplest < simplicity]
        return (min(simpler, key=lambda n: n.simplest), near_s) if simpler else None

    def _dive(self, faster: Sequence[Node]) -> Node | None:
        """The node that is nearest to a plan, if it is time for a dive; `faster` may have faster
        plans, the least bound first."""
        least_s, since = faster[0].least_s, self._row.n_since_faster % _DIVES_EVERY
        if since < _DIVES_EVERY - _DIVE_LENGTH or self.incumbent_s <= least_s * (1 + _DIVES_REL):
            return None
        if not least_s:  # of some nothing is known yet
            return None
        has_recipes = self.incumbent_s > least_s * (1 + _RECIPES_REL)
        able = [n for n in faster if n.depth and (has_recipes or not n.recipe)]
        return min(able, key=lambda n: (-n.depth, n.turn), default=None)

    def _worth_s(self, node: Node) -> float:
        """Plans of the node that take as long, or longer, do not matter. Those in a less simple
        order than the plan chosen so far matter only outside of its tie."""
        worth_s = self.incumbent_s * (1 - self.tolerance)
        if self.found and node.simplest.order > self._rank(self.chosen).order:
            return min(worth_s, self.chosen.step_time_s / (1 + self.tie))
        return worth_s

    def _rank(self, solved: Solved) -> Simplicity:
        key = Same(solved)
        if key not in self._ranks:
            self._ranks[key] = self.rank(solved)
        return self._ranks[key]


@dataclass
class _Row:
    """How often nodes of one `name`, and of all, were refined in a row without a faster plan."""

    name: str = ""
    incumbent_s: float = math.inf
    length: int = 0
    n_since_faster: int = 0

    def add(self, name: str, incumbent_s: float) -> None:
        is_alike = incumbent_s == self.incumbent_s
        self.n_since_faster = self.n_since_faster + 1 if is_alike else 1
        goes_on = name == self.name and is_alike
        self.length = self.length + 1 if goes_on else 1
        self.name, self.incumbent_s = name, incumbent_s

    def next_names(self, nodes: list[Node]) -> list[Node]:
        """The nodes of other names, if it is their turn and there are any."""
        if self.length < _MOST_IN_A_ROW:
            return nodes
        return [node for node in nodes if node.name != self.name] or nodes
