"""Builds the choice problems of one program in several cases: variables, edges, and what they cost.

Consumers are equal if they read a tensor with the same operator at the same argument: q, k and v
after one norm. They read it through one reuse variable. So its reshard is priced once, because it
runs once, forward and backward. A parameter with two different uses (a tied embedding) has a reuse
variable over pairs of placements; where the two agree, its conversion is priced once.

Of choices as fast as each other that with the fewest collectives wins, then that with the plainest
placements. Such a *tie* is counted in collectives of a step, and each costs `TIE_REL` of the least
seconds that all groups compute. A solver sees seconds alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.arrays import Array, Codes
from autopar.errors import InfeasibleError
from autopar.identity import Same
from autopar.passes.analysis import Side, boundary_specs, values_at_matmuls
from autopar.passes.intra.candidates import GroupCandidates
from autopar.passes.intra.cases import Cases
from autopar.passes.intra.hiding import HidableCosts
from autopar.passes.intra.parameters import ParameterMaker, Uses
from autopar.passes.intra.priced import ConversionCosts, Priced
from autopar.passes.intra.problem import IntraOpProblem, IntraOpProblems, RangeMode
from autopar.passes.reshard import ReshardTables, SpecColumn
from autopar.passes.solvers.problem import ChoiceProblems, Edge
from autopar.placement import PREFERENCE, I, R, Spec
from autopar.program.graph import Program
from autopar.program.lines import Storage

# Small beside what a cost model resolves, large beside the rounding of sums.
TIE_REL = 1e-11
MAX_PAIRS = 1500  # the largest domain of a reuse variable over pairs of placements


@dataclass(frozen=True)
class Consumer:
    """A group that reads a value, with the operator and the argument that read it first, and the
    names of all its operators that do."""

    variable: int
    kind: tuple[str, int]
    operators: tuple[str, ...]


@dataclass
class BuiltVariable:
    """A variable of a problem under construction.

    Its numbers are [cases or 1, choices]; `specs[value]` has a spec per choice.
    """

    name: str
    cost_s: Array
    size_bytes: Array
    specs: dict[str, SpecColumn] = field(default_factory=dict)


@dataclass(frozen=True)
class ReshardEdge:
    """The edge of a value's reshard, from the variable that makes it to one that reads it.

    `target` is a reader or a reuse variable; `readers` are the groups that read the value.
    """

    edge: int
    value: str
    source: int
    target: int
    readers: tuple[int, ...]


@dataclass
class ProblemBuilder:
    """Builds the problem of one stage in several cases."""

    program: Program
    cases: Cases
    maker: ParameterMaker
    priced: Priced
    launches_s: float = 0.0
    variables: list[BuiltVariable] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    storages: dict[str, tuple[Storage, ...]] = field(default_factory=dict)
    parameter_variables: dict[str, int] = field(default_factory=dict)
    boundary_variables: dict[tuple[Side, str], int] = field(default_factory=dict)
    reshards: list[ReshardEdge] = field(default_factory=list)
    modes: list[RangeMode] = field(default_factory=list)
    hidable: dict[int, HidableCosts] = field(default_factory=dict)
    may_be_last: dict[int, float] = field(default_factory=dict)
    waits_per_sync: float = 0.0
    tie_s: Array = field(default_factory=lambda: np.zeros(1))
    _tied_costs: dict[tuple[Same, Same], Array] = field(default_factory=dict)

    def connect(self, candidates: Sequence[GroupCandidates]) -> None:
        """Make all variables and edges."""
        producer: dict[str, int] = {}
        least_s = sum((c.table.time_s.min(axis=-1) for c in candidates), np.zeros(1))
        self.tie_s = TIE_REL * np.where((least_s > 0) & np.isfinite(least_s), least_s, 1.0)
        for index, c in enumerate(candidates):
            self.variables.append(
                BuiltVariable(
                    c.group.name, self.add_ties(c.table.time_s, c.table.preference[None]),
                    c.table.size_bytes,
                    {n: c.specs(n) for n in (*c.group.inputs, *c.group.outputs)},
                )
            )  # fmt: skip
            producer.update(dict.fromkeys(c.group.outputs, index))
        for value in self.program.received:
            producer[value] = self._add_boundary(value, "received")
        for value in self.program.sent:
            self._reshard_edge(value, producer[value], self._add_boundary(value, "sent"))
        consumers = self._consumers(candidates)
        for value, readers in consumers.items():
            if value in producer:
                self._connect_value(value, producer[value], readers)
        for name in self.program.parameters:
            self._connect_parameter(name, consumers.get(name, []))
        self._price_ends(producer)

    def finish(self, candidates: Sequence[GroupCandidates]) -> IntraOpProblems:
        """The problems, from the variables and edges built so far."""
        numbers = ChoiceProblems(
            len(self.cases),
            tuple(v.name for v in self.variables),
            tuple(v.cost_s for v in self.variables),
            tuple(v.size_bytes for v in self.variables),
            tuple(self.edges),
            frozenset(self.parameter_variables.values()),
        )
        crossing = {
            (side, value): self.variables[index].specs[value]
            for (side, value), index in self.boundary_variables.items()
        }
        first = IntraOpProblem(
            numbers.of(0), tuple(candidates), dict(self.storages), dict(self.parameter_variables),
            dict(self.boundary_variables), crossing, tuple(self.modes), self.maker.hiding,
            self.cases.counts, dict(self.hidable), dict(self.may_be_last), self.waits_per_sync,
            self.launches_s,
        )  # fmt: skip
        return IntraOpProblems(numbers, first)

    def add_ties(self, cost_s: Array, tie: NDArray[np.floating[Any]]) -> Array:
        """Seconds with what breaks ties: [cases or 1, ...]. Equal problems share one sum."""
        key = Same(cost_s), Same(tie)
        if key not in self._tied_costs:
            weight = self.tie_s.reshape(-1, *(1,) * (cost_s.ndim - 1))
            self._tied_costs[key] = cost_s + weight * tie if tie.any() else cost_s
        return self._tied_costs[key]

    def _add_conversions(
        self, index: int, target: int, found: ConversionCosts, columns: Codes | None
    ) -> None:
        cost_s = self.add_ties(found.cost_s, found.tie)
        self.edges.append(Edge(index, target, cost_s, found.size_bytes, None, columns))

    def _add_boundary(self, value: str, side: Side) -> int:
        """Add a variable for the spec of a crossing value; all specs cost the same to send."""
        of_cases = [
            boundary_specs(self.cases.types[m][value], cost.mesh.sizes, side)
            for cost, m in self.cases.every
        ]
        distinct = tuple(dict.fromkeys(of_cases))
        specs = tuple(dict.fromkeys(itertools.chain.from_iterable(distinct)))
        index = self._add_variable(f"{value} {side}", {value: SpecColumn.of(specs)})
        self.boundary_variables[side, value] = index
        marks = {of: [spec in of for spec in specs] for of in distinct}
        legal = np.array([marks[of] for of in of_cases], dtype=bool)
        in_order = np.linspace(0.0, 1e-6, len(specs))[None]
        self.variables[index].cost_s = self.add_ties(np.where(legal, 0.0, np.inf), in_order)
        return index

    def tables(self, value: str) -> ReshardTables:
        """The reshards of a value; for a parameter, one case per mesh.

        Under `forbid="sequence"`, activations may not reduce_scatter.
        """
        restricted = "sequence" in self.maker.limits.constraints.forbid
        is_parameter = value in self.program.parameters
        restricted = restricted and not is_parameter
        hides = self.cases.costs[0].hides_tp and value in values_at_matmuls(self.program)
        return self.priced.tables(self.cases, value, is_parameter, restricted, hides)

    def _consumers(self, candidates: Sequence[GroupCandidates]) -> dict[str, list[Consumer]]:
        out: dict[str, list[Consumer]] = {}
        for index, c in enumerate(candidates):
            for value in c.group.inputs:
                members = [m.operator for m in c.group.members if value in m.operator.inputs]
                kind = (str(members[0].call.op), members[0].inputs.index(value))
                names = tuple(operator.name for operator in members)
                out.setdefault(value, []).append(Consumer(index, kind, names))
        return out

    def _connect_value(self, value: str, source: int, readers: Sequence[Consumer]) -> None:
        alike: dict[tuple[str, int], list[int]] = {}
        for reader in readers:
            alike.setdefault(reader.kind, []).append(reader.variable)
        for options, members in (s for of in alike.values() for s in self._clusters(value, of)):
            if len(members) == 1:
                target = members[0]
            else:
                target = self._add_reuse(value, options, members)
            edge = self._reshard_edge(value, source, target)
            self.reshards.append(ReshardEdge(edge, value, source, target, tuple(members)))

    def _clusters(self, value: str, members: Sequence[int]) -> list[tuple[list[Spec], list[int]]]:
        """(placements in common, members): each member joins the first with which it has any."""
        found: list[tuple[list[Spec], list[int]]] = []
        for member in members:
            available = dict.fromkeys(self.variables[member].specs[value].distinct)
            for options, others in found:
                common = [s for s in options if s in available]
                if common:
                    options[:] = common
                    others.append(member)
                    break
            else:
                found.append(([*available], [member]))
        return found

    def _add_reuse(self, value: str, options: Sequence[Spec], members: Sequence[int]) -> int:
        """Add a variable for the placement that `members` share, and edges that enforce it."""
        specs = self.priced.placed.column(tuple(options))
        shared = self._add_variable(f"{value} reused", {value: specs})
        for member in members:
            self._equality_edge(shared, specs, member, self.variables[member].specs[value])
        return shared

    def _add_variable(self, name: str, specs: dict[str, SpecColumn]) -> int:
        zero = self.priced.placed.zeros(len(next(iter(specs.values()))))
        self.variables.append(BuiltVariable(name, zero, zero, specs))
        return len(self.variables) - 1

    def _equality_edge(
        self, shared: int, mine: SpecColumn, member: int, theirs: SpecColumn
    ) -> None:
        cost_s = self.priced.placed.equality(mine, theirs)
        self.edges.append(Edge(shared, member, cost_s, None, mine.code, theirs.code))

    def _reshard_edge(self, value: str, source: int, target: int) -> int:
        """Add the edge of a value's reshard; returns its index."""
        made, wanted = self.variables[source].specs[value], self.variables[target].specs[value]
        found = self.priced.reshards(self.cases, self.tables(value), made, wanted)
        cost_s = self.add_ties(found.cost_s, found.tie)
        self.edges.append(Edge(source, target, cost_s, None, made.code, wanted.code))
        return len(self.edges) - 1

    def _price_ends(self, producer: Mapping[str, int]) -> None:
        """Price the reshard of final values to their end placement.

        The loss ends Invariant on every axis, so that every rank seeds backward with 1. The new
        value of a buffer ends whole.
        """
        sizes, m = self.cases.costs[0].mesh.sizes, self.cases.n_microbatches[:, None]
        for value in (self.program.loss, *self.program.updates):
            if value is None or value not in producer:
                continue
            variable, tables = self.variables[producer[value]], self.tables(value)
            plain = I if self.cases.type(value).has_grad else R
            goal = tables.index[Spec.everywhere(plain, sizes)]
            rows = variable.specs[value].lookup(tables.index)
            time_s, tie = tables.between(rows.tolist(), [goal])
            variable.cost_s = variable.cost_s + self.add_ties(time_s[..., 0], tie[..., 0]) * m

    def _connect_parameter(self, name: str, readers: Sequence[Consumer]) -> None:
        members = [r.variable for r in readers]
        read_as = (self.variables[m].specs[name].distinct for m in members)
        used = tuple(dict.fromkeys(itertools.chain.from_iterable(read_as)))
        storages = self.priced.placed.storages(self.maker, name, self.cases.type(name), used)
        if not storages.every:
            sizes = " x ".join(map(str, self.cases.costs[0].mesh.sizes))
            raise InfeasibleError(
                f"no allowed storage is left for {self.program.parameters[name].name} "
                f"on axes of {sizes} ranks",
                hint="relax force, or give its stage more ranks",
            )
        time_s, tie, size_bytes = self.priced.storage_costs(
            self.maker, self.cases.type(name), storages
        )
        index = len(self.variables)
        self.variables.append(
            BuiltVariable(f"{name} stored", self.add_ties(time_s, tie), size_bytes)
        )
        self.storages[name], self.parameter_variables[name] = storages.every, index
        if len(members) == 1:
            uses = (self.variables[members[0]].specs[name],)
            self._conversion_edge(name, index, members[0], uses, [readers])
        elif members:
            self._connect_shared_parameter(name, index, readers)

    def _connect_shared_parameter(self, name: str, index: int, readers: Sequence[Consumer]) -> None:
        """Equal uses that can agree do; uses of two kinds choose a pair, converted once where they
        agree."""
        alike: dict[tuple[str, int], list[Consumer]] = {}
        for reader in readers:
            alike.setdefault(reader.kind, []).append(reader)
        clusters, domains = list[list[Consumer]](), list[tuple[Spec, ...]]()
        for cluster in alike.values():
            for options, members in self._clusters(name, [reader.variable for reader in cluster]):
                clusters.append([reader for reader in cluster if reader.variable in members])
                domains.append(tuple(options))
        if len(clusters) == 2 and len(domains[0]) * len(domains[1]) <= MAX_PAIRS:
            columns: tuple[SpecColumn, ...] = self.priced.placed.pairs(*domains)
        else:
            common = tuple(s for s in domains[0] if all(s in d for d in domains[1:]))
            if not common:
                parameter = self.program.parameters[name].name
                raise InfeasibleError(
                    f"the uses of `{parameter}` have no placement in common",
                    hint="relax manual=, forbid= or force= there; without them a plan is searched",
                )
            columns = (self.priced.placed.column(common),) * len(clusters)
        shared = self._add_variable(
            f"{name} used", {f"{name}:{k}": c for k, c in enumerate(columns)}
        )
        # On the first reader, because a pair without costs of its own is a mere view
        # (`passes/solvers/problem/tables.py`).
        first = self.variables[clusters[0][0].variable]
        read = first.specs[name]
        preference = [sum(PREFERENCE[p.kind] for p in s.placements) * 1e-5 for s in read.distinct]
        first.cost_s = self.add_ties(first.cost_s, np.array(preference)[read.code][None])
        for column, cluster in zip(columns, clusters, strict=True):
            for member in (reader.variable for reader in cluster):
                self._equality_edge(shared, column, member, self.variables[member].specs[name])
        self._conversion_edge(name, index, shared, columns, clusters)

    def _conversion_edge(
        self, name: str, index: int, target: int,
        uses: tuple[SpecColumn, ...], clusters: Sequence[Sequence[Consumer]],
    ) -> None:  # fmt: skip
        """Add the edge from storage to use(s); every distinct use is converted once.

        `clusters` are the readers of each.
        """
        known = self.maker, self.tables(name), self.storages[name]
        of = self.maker.gathering[name]
        each_use = tuple(
            Uses(
                len(readers), sum(not of.again.isdisjoint(r.operators) for r in readers),
                of.fused_bytes, 0.0 if k else of.first_share, of.again_share, of.last_share,
                of.micro_share, any(not of.stays.isdisjoint(r.operators) for r in readers),
            )
            for k, readers in enumerate(clusters)
        )  # fmt: skip
        if len(uses) == 1:
            found = self.priced.conversions(*known, uses[0], each_use[0])
            self._add_conversions(index, target, found, uses[0].code)
        else:
            found = self.priced.shared_conversions(*known, uses, each_use)
            if not np.isfinite(found.cost_s).any():  # no storage is the recipe's for both
                found = self.priced.shared_conversions(
                    self.maker.search_maker, *known[1:], uses, each_use
                )
            self._add_conversions(index, target, found, None)
        self.hidable[index] = found.hidable
        self.may_be_last[index] = of.may_be_last
        if of.may_be_last:  # alike for all of them
            self.waits_per_sync = of.last_share / (1 - of.last_share)
