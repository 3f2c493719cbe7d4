"""All plans of a small program on one view of its devices, simulated without the search.

A plan is a joint strategy per group of operators, and a storage per parameter. Which of them are
legal is read from the choice problem; its costs and the solvers are not used. Plans are lowered and
simulated in the order of their floors, until no floor is below the best step. A *floor* of a plan
is the greater of two sums, both at most its step:

    once        the update of shards; the gathers before forward
    m times     operators and reshards of activations, both ways
    or instead  of backward only collectives, and those that return gradients

Compute hides nothing of the first sum, and only backward's operators hide what the second one has
instead (`cost/price/overlap.py`). Calls of several parameters may share a bucket, which takes at
least their mean. Parameters with their states are a floor of the peak. All floors are checked on
all simulated plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.cost.laws import CostModel
from autopar.cost.memory import optimizer_time_s, static_bytes_per_param
from autopar.cost.price import StepPricer
from autopar.passes.analysis import Analysis, compute_dtype
from autopar.passes.intra import Constraints, IntraOpProblem, intra_op_problem
from autopar.passes.lowering import PlacedStage, join
from autopar.passes.reshard import reshard_table, step_time_s
from autopar.placement import COLLECTIVES, I, Spec, local_shape
from autopar.program.lines import CallLine, OperatorStrategy, Storage, Strategy

Array = NDArray[np.float64]
Choice = tuple[int, ...]
REL = 1e-9
OPTIMIZER = "adamw"


@dataclass(frozen=True)
class Plan:
    """A simulated plan."""

    name: str
    step_time_s: float
    peak_bytes: float
    strategy: Strategy = field(repr=False)

    def __str__(self) -> str:
        operators = (
            f"  {name}: {', '.join(map(str, of.inputs))} -> {', '.join(map(str, of.outputs))}"
            for name, of in self.strategy.operators.items()
        )
        stored = (
            f"  {name}: {of.spec}, once per {of.period}"
            for name, of in self.strategy.storage.items()
        )
        return "\n".join((self.name, *operators, *stored))


@dataclass(eq=False)
class Space:
    """The plans on one view with `m` microbatches; a choice: an index per group and parameter.

    Every parameter, and every value that a group makes, is read by one group.
    """

    analysis: Analysis
    cost: CostModel
    m: int
    forbid: frozenset[str]
    pricer: StepPricer
    simulated: dict[Choice, Plan] = field(default_factory=dict)

    @cached_property
    def problem(self) -> IntraOpProblem:
        """Only what is legal is read from it."""
        limits = Constraints(self.forbid)
        return intra_op_problem(self.analysis, self.cost, self.m, limits, OPTIMIZER)

    @cached_property
    def groups(self) -> list[list[dict[str, OperatorStrategy]]]:
        """[groups][choices]: the strategies of a group's operators."""
        return [[c.strategies(i) for i in range(len(c))] for c in self.problem.candidates]

    @cached_property
    def storages(self) -> dict[str, tuple[Storage, ...]]:
        by_variable = sorted(self.problem.parameter_variables.items(), key=lambda of: of[1])
        assert [v for _, v in by_variable] == [*range(len(self.groups), len(self.shape))]
        return {name: self.problem.storages[name] for name, _ in by_variable}

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return (*map(len, self.groups), *map(len, self.problem.storages.values()))

    def strategy(self, choice: Choice) -> Strategy:
        operators: dict[str, OperatorStrategy] = {}
        for of_group, i in zip(self.groups, choice, strict=False):
            operators |= of_group[i]
        picked = zip(self.storages.items(), choice[len(self.groups) :], strict=True)
        return Strategy(
            operators, {name: every[i] for (name, every), i in picked},
            self.analysis.microbatch_types(self.m).tensors, self.analysis.batch.cells,
            self.analysis.batch.size, self.m, "sequence" in self.forbid,
        )  # fmt: skip

    def plan(self, choice: Choice) -> Plan:
        """The plan, lowered and simulated; no floor is above it."""
        if choice not in self.simulated:
            strategy = self.strategy(choice)
            stage = PlacedStage(self.analysis, strategy, self.cost)
            found = self.pricer(join([stage], "1f1b"), [self.cost])
            name = f"{dict(self.cost.mesh.axes)}, m={self.m}"
            plan = Plan(name, found.step_time_s, found.peak_bytes, strategy)
            assert self.floor_s[choice] <= plan.step_time_s * (1 + REL), f"{plan}"
            assert self.floor_bytes[choice] <= plan.peak_bytes * (1 + REL), f"{plan}"
            self.simulated[choice] = plan
        return self.simulated[choice]

    def best(self, limit_bytes: float, known: Plan | None) -> Plan | None:
        """The fastest plan within the limit, if it is faster than `known`."""
        best_s = known.step_time_s if known else math.inf
        worth = (self.floor_s < best_s) & (self.floor_bytes <= limit_bytes)
        places = np.flatnonzero(worth)
        for place in places[np.argsort(self.floor_s.flat[places], kind="stable")]:
            choice = tuple(map(int, np.unravel_index(place, self.shape)))
            if known is not None and self.floor_s[choice] >= known.step_time_s:
                break
            plan = self.plan(choice)
            fits = plan.peak_bytes <= limit_bytes
            if fits and (known is None or plan.step_time_s < known.step_time_s):
                known = plan
        return known

    def leanest(self) -> Plan:
        """A plan with the least bytes of parameters and states, and the least floor of such."""
        least = self.floor_bytes <= self.floor_bytes[np.isfinite(self.floor_s)].min()
        place = int(np.argmin(np.where(least, self.floor_s, np.inf)))
        return self.plan(tuple(map(int, np.unravel_index(place, self.shape))))

    # -- floors ------------------------------------------------------------------------------------

    @cached_property
    def floor_s(self) -> Array:
        """[choices of each variable]: the floor of the step; infinite for what is not legal."""
        floors = np.zeros((2, *self.shape))
        for at, of in (*self._legality(), *self._operators(), *self._reshards(), *self._stored()):
            floors += _along(of, at, len(self.shape))
        return np.maximum(*floors)

    @cached_property
    def floor_bytes(self) -> Array:
        each = static_bytes_per_param(OPTIMIZER, compute_dtype(self.analysis)).total_bytes
        total = np.zeros(self.shape)
        for k, name in enumerate(self.storages):
            held = np.array([each * n for n in self._elements(name)])
            total = total + _along(held, (len(self.groups) + k,), len(self.shape))
        return total

    def _elements(self, name: str) -> list[int]:
        """How many elements of a parameter a rank stores, by storage."""
        tensor, sizes = self.analysis.types.tensors[name], self.cost.mesh.sizes
        return [math.prod(local_shape(tensor, s.spec, sizes)) for s in self.storages[name]]

    def _legality(self) -> Iterator[tuple[tuple[int, ...], Array]]:
        """Infinite where the problem rules out a choice, or a pair of them; else 0."""
        for v, cost_s in enumerate(self.problem.numbers.cost_s):
            yield (v,), np.where(np.isfinite(cost_s), 0.0, np.inf)[None]
        for edge in self.problem.numbers.edges:
            choice = [0] * len(self.shape)
            found = np.zeros((self.shape[edge.u], self.shape[edge.v]))
            for i, j in np.ndindex(found.shape):
                choice[edge.u], choice[edge.v] = i, j
                found[i, j] = 0.0 if np.isfinite(edge.cost_s[edge.at(choice)]) else np.inf
            assert edge.u != edge.v
            at, found = (
                ((edge.u, edge.v), found) if edge.u < edge.v else ((edge.v, edge.u), found.T)
            )
            yield at, found[None]

    def _operators(self) -> Iterator[tuple[tuple[int, ...], Array]]:
        """Both ways of each group's operators, the least seen beside all neighbouring choices."""
        owner = {
            self.analysis.program.keys[name]: g
            for g, of_group in enumerate(self.groups)
            for name in of_group[0]
        }
        least_s = [np.full((2, n), np.inf) for n in self.shape[: len(self.groups)]]
        for choice in self._samples():
            stage = PlacedStage(self.analysis, self.strategy(choice), self.cost)
            times_s = np.zeros((len(self.groups), 2))
            for line in join([stage], "1f1b").stages[0].body:
                if isinstance(line, CallLine):
                    times_s[owner[line.key]] += line.forward_s + line.backward_s, line.forward_s
            for g, of_group in enumerate(least_s):
                of_group[:, choice[g]] = np.minimum(of_group[:, choice[g]], times_s[g])
        for g, of_group in enumerate(least_s):
            yield (g,), of_group * self.m

    def _samples(self) -> Iterator[Choice]:
        """Choices with every strategy of every group; with biases, beside every neighbour's: a
        matmul adds the bias of the next group where both are placed alike."""
        sizes, first = self.shape[: len(self.groups)], (0,) * len(self.storages)
        if all(len(self.analysis.types.tensors[name].dims) > 1 for name in self.storages):
            for k in range(max(sizes)):
                yield (*(k % n for n in sizes), *first)
            return
        for g, pair in enumerate(itertools.pairwise(sizes)):
            for i, j in np.ndindex(pair):
                yield (
                    *(i if k == g else j if k == g + 1 else 0 for k in range(len(sizes))),
                    *first,
                )

    def _reshards(self) -> Iterator[tuple[tuple[int, ...], Array]]:
        """Both ways of the reshards of what groups make, and of the loss to its end."""
        every, loss = self.problem.candidates, self.analysis.program.loss
        for g, c in enumerate(every):
            for value in c.group.outputs:
                made = [c.spec(i, value) for i in range(len(c))]
                for reader in (
                    r for r in range(g + 1, len(every)) if value in every[r].group.inputs
                ):
                    of = every[reader]
                    wanted = [of.spec(i, value) for i in range(len(of))]
                    yield (g, reader), self._both_s(value, made, wanted)
                if value == loss:
                    end = [Spec.everywhere(I, self.cost.mesh.sizes)]
                    yield (g,), self._both_s(value, made, end)[..., 0]

    def _both_s(self, value: str, made: Sequence[Spec], wanted: Sequence[Spec]) -> Array:
        forward_s, backward_s, returned_s = self._moves_s(value, made, wanted)
        return self.m * np.stack((forward_s + backward_s, forward_s + returned_s))

    def _stored(self) -> Iterator[tuple[tuple[int, ...], Array]]:
        """The update of stored shards, and what is gathered once, before forward."""
        device, dtype = self.cost.mesh.device, compute_dtype(self.analysis)
        launch_s = optimizer_time_s(0, OPTIMIZER, dtype, device)
        for k, (name, every) in enumerate(self.storages.items(), start=len(self.groups)):
            update = [optimizer_time_s(n, OPTIMIZER, dtype, device) for n in self._elements(name)]
            yield (k,), (np.array(update) - launch_s)[None]
            reader, c = next(
                (g, c) for g, c in enumerate(self.problem.candidates) if name in c.group.inputs
            )
            wanted = [c.spec(i, name) for i in range(len(c))]
            moves_s = self._moves_s(name, [s.spec for s in every], wanted)
            once = np.array([[s.period != "use"] for s in every])
            n_times = np.array([[1 if s.period == "step" else self.m] for s in every])
            # One bucket may hold all parameters, and takes no less than the mean of its parts.
            waited_s = np.where(once, moves_s[0], 0.0) / len(self.storages)
            returned_s = moves_s[2] * n_times / len(self.storages)
            yield (reader, k), np.stack((waited_s.T, (waited_s + returned_s).T))

    def _moves_s(self, value: str, made: Sequence[Spec], wanted: Sequence[Spec]) -> Array:
        """[3, made, wanted]: seconds of a reshard forward, backward, and backward's collectives."""
        tensor = self.analysis.microbatch_types(self.m).tensors[value]
        restricted = "sequence" in self.forbid and value not in self.storages
        table, price = reshard_table(tensor, self.cost, restricted), self.cost.primitive_time_s

        @cache
        def seconds(source: Spec, target: Spec) -> Array:
            total = np.zeros(3)
            for step in table.path(source, target):
                forward_s, backward_s = step_time_s(step, tensor.has_grad, price)
                total += forward_s, backward_s, backward_s * (step.move.backward in COLLECTIVES)
            return total

        found = [[seconds(source, target) for target in wanted] for source in made]
        return np.moveaxis(np.array(found), -1, 0)


def _along(of: Array, at: Sequence[int], n_dims: int) -> Array:
    """`of`, whose last dims are the places `at` of `n_dims`; places must rise."""
    shape = [1] * n_dims
    for place, n in zip(at, of.shape[of.ndim - len(at) :], strict=True):
        shape[place] = n
    return of.reshape(*of.shape[: of.ndim - len(at)], *shape)
