"""Recompute as part of the intra-operator problem: per range, what is saved and what runs again.

Each range that may run again (`Recomputable` in `passes/analysis/recompute.py`) gets a variable in
the problem: its mode. A mode that is given gets no variable, and only its costs are added. Modes:

    none        the range saves what its operators save
    gathers     it saves what its operators save, as shards where a reshard gathers it; these
                reshards run once more
    full        it saves its inputs; its operators and reshards run once more
    selective   it saves its inputs and the results of matmuls and collectives; the rest runs once
                more. Not saved are the results of its last operator, and a matmul's result that
                only a collective reads

Seconds and bytes of an operator depend on its group's choice and on the mode: a table over the two.
Those of a reshard depend on the spec made, the spec wanted and the mode. So its edge leads to a
variable over pairs (spec wanted, mode), which must equal the choices of the target and the range.

So every number that depends on one range alone is exact. The other cases:

    values with several parties    are always charged (`rerun.py`)
    parameters gathered at use     are gathered as often as without recompute: once forward, once
                                   backward
    live bytes while a range       are in the simulated peak, not in this problem
    runs again
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from autopar.arrays import Array, BoolArray, Codes, Indices
from autopar.caching import once
from autopar.manual import Recompute
from autopar.passes.analysis import Analysis, Recomputable
from autopar.passes.intra.builder import BuiltVariable, ProblemBuilder, ReshardEdge
from autopar.passes.intra.candidates import CandidateMaker, ChoiceTable, GroupCandidates
from autopar.passes.intra.cases import Cases
from autopar.passes.intra.member_prices import MemberPrice
from autopar.passes.intra.problem import RangeMode
from autopar.passes.intra.rerun import RerunCosts, RerunRanges, n_shards_of, rerun_costs
from autopar.passes.reshard import ReshardTables, SpecColumn
from autopar.passes.solvers.problem import Edge

# Breaks ties towards less recompute. Beside sums of other ties it is too small to decide more.
_MODE_TIE = 1e-2
# Modes in which operators save what they save.
_SAVING: tuple[Recompute | None, ...] = (None, "gathers")


def add_recompute(
    builder: ProblemBuilder,
    candidates: Sequence[GroupCandidates],
    maker: CandidateMaker,
    analysis: Analysis,
    recomputable: Recomputable,
) -> None:
    """Add the modes of the ranges to a problem that has all other variables and edges."""
    ranges = RerunRanges(analysis, recomputable.within(analysis))
    _Adder(builder, candidates, maker, ranges, recomputable.modes).add()


@dataclass(frozen=True, eq=False)
class _Adder:
    builder: ProblemBuilder
    candidates: Sequence[GroupCandidates]
    maker: CandidateMaker
    ranges: RerunRanges
    modes: tuple[Recompute | None, ...]
    # (variable, range) -> seconds and bytes, [cases, modes, choices].
    _joined: dict[tuple[int, int], tuple[Array, Array]] = field(default_factory=dict)
    # Result of a matmul -> seconds of a step, [cases, choices], for the bias that is added to it.
    _sums: dict[str, Array] = field(default_factory=dict)
    _interned: dict[tuple[tuple[int, ...], bytes], Array] = field(default_factory=dict)
    # Edges of reshards whose results are saved: in "gathers", what of them.
    _saved_edges: set[int] = field(default_factory=set)
    _in_modes_of: dict[Hashable, tuple[Array, Array] | None] = field(default_factory=dict)

    @property
    def cases(self) -> Cases:
        return self.builder.cases

    def add(self) -> None:
        for v in range(len(self.candidates)):
            self._add_group(v)
        for r, values in enumerate(self.ranges.taken):
            for value in values:
                self._take(value, r)
        variables = [self._mode_variable(r) for r in range(len(self.ranges.every))]
        for (v, r), (cost_s, size_bytes) in self._joined.items():
            self._join(v, r, variables[r], self._intern(cost_s), self._intern(size_bytes))
        for reshard in self.builder.reshards:
            if (at := self._range_of(reshard)) is not None:
                self._run_reshard_again(reshard, variables[at])
        names = [operator.name for operator in self.ranges.analysis.operators]
        self.builder.modes += [
            RangeMode(tuple(names[i] for i in positions), self.modes, variable)
            for positions, variable in zip(self.ranges.full, variables, strict=True)
        ]

    def _add_group(self, v: int) -> None:
        """Add what the operators of a group spend and save.

        Bytes saved in a range that may run again move from the group to the range.
        """
        candidates = self.candidates[v]
        positions = [self.ranges.place[member.name] for member in candidates.group.members]
        if not any(i in self.ranges.party_of for i in positions):
            return
        always = np.zeros((len(self.cases), len(candidates)))
        prices = self._prices(candidates.table)
        for item, price, i in zip(candidates.group.members, prices, positions, strict=True):
            n_like, r = self.maker.n_stood_for(item), self.ranges.party_of.get(i)
            always += price.at_once_bytes
            if r is None:
                always += n_like * price.kept_bytes
                continue
            is_kept = self._is_kept(v, i)
            again_s = self._again_s(price)
            matmul = self.ranges.matmul_of_bias_add(i)
            if matmul is not None:  # it runs with its matmul, unless a reshard is between them
                self._sums[matmul] = again_s
            if self.ranges.runs_again(i, "full"):
                self._spend(v, r, again_s, "full")
            if self.ranges.runs_again(i, "selective"):
                apart_s = np.where(is_kept | (matmul is not None), 0.0, again_s)
                self._spend(v, r, apart_s, "selective")
            self._charge(v, r, price.own_bytes, *_SAVING)
            if self.ranges.rule(i).saves_more:
                self._charge(v, r, np.where(is_kept, price.own_bytes, 0.0), "selective")
            for number, size_bytes in price.kept.items():
                value = candidates.group.values[number]
                if self.ranges.is_only(value, r):
                    self._charge(v, r, size_bytes, *self._saving_modes(v, r, value))
                else:
                    always += n_like * size_bytes
            is_read = i in self.ranges.matmuls_read_again
            for value in item.operator.outputs if is_read and is_kept.any() else ():
                self._keep_result(v, r, value, is_kept)
        self.builder.variables[v].size_bytes = self._intern(always)

    def _saving_modes(self, v: int, r: int, value: str) -> Sequence[Recompute | None]:
        """The modes in which a group is charged for a value that it saves.

        If a reshard of the range makes it, what is saved in "gathers" depends on that.
        """
        owner = self.ranges.owner(value)
        made_by = [
            reshard
            for reshard in self.builder.reshards
            if v in reshard.readers and self.ranges.owner(reshard.value) == owner
        ]
        if len(made_by) != 1 or self._range_of(made_by[0]) != r:
            return _SAVING
        self._saved_edges.add(made_by[0].edge)
        return (None,)

    @cached_property
    def _representatives(self) -> Mapping[ChoiceTable, GroupCandidates]:
        """One of the equal groups that share a table."""
        return {candidates.table: candidates for candidates in self.candidates}

    @once
    def _prices(self, table: ChoiceTable) -> tuple[MemberPrice, ...]:
        return self.maker.members(self._representatives[table])

    @once
    def _again_s(self, price: MemberPrice) -> Array:
        """[cases, choices]: seconds of a step that running it again adds."""
        return (price.again_s + price.inner_s) * self.cases.n_microbatches[:, None]

    def _is_kept(self, v: int, i: int) -> BoolArray:
        """[choices]: is the result saved in mode "selective"?"""
        candidates = self.candidates[v]
        last = self.ranges.every[self.ranges.party_of[i]][-1]
        if not self.ranges.is_matmul(i) or i == last:
            return np.zeros(len(candidates), dtype=bool)
        name = self.ranges.analysis.operators[i].name
        position = [member.name for member in candidates.group.members].index(name)
        strategies = candidates.group.members[position].strategies
        is_replaced = [
            any(strategies[joint.members[position]].lowering for joint in joints)
            for joints in candidates.table.choices
        ]
        return ~np.array(is_replaced, dtype=bool)

    def _keep_result(self, v: int, r: int, value: str, is_kept: BoolArray) -> None:
        if self.ranges.is_only(value, r) and not self._is_handed_on(v, r, value, is_kept):
            size_bytes = self._local_bytes(value, self.candidates[v].specs(value))
            self._charge(v, r, np.where(is_kept, size_bytes, 0.0), "selective")

    def _is_handed_on(self, v: int, r: int, value: str, is_kept: BoolArray) -> bool:
        """Is its only reader a reshard of the range, which then decides whether it is saved? It may
        read a view, or the sum with a bias; the last of several decides."""
        operator = self.ranges.analysis.operators[self.ranges.place[self.candidates[v].group.name]]
        saved = self.ranges.analysis.saved[operator.name]
        readers = self._reshards_of.get(self._decisive(value), [])
        return (
            len(readers) == 1
            and self._range_of(readers[0]) == r
            and not saved.outputs
            and bool(is_kept.all())
        )

    @once
    def _decisive(self, value: str) -> str:
        """What a value is called where the last reshard reads it."""
        moved = [name for name in self.ranges.aliases(value) if name in self._reshards_of]
        return moved[-1] if moved else value

    @cached_property
    def _reshards_of(self) -> Mapping[str, list[ReshardEdge]]:
        found: dict[str, list[ReshardEdge]] = {}
        for reshard in self.builder.reshards:
            found.setdefault(reshard.value, []).append(reshard)
        return found

    def _take(self, value: str, r: int) -> None:
        """Charge a range for a value that it reads, in the spec in which it is made.

        With several parties, the first range pays, unless an operator saves the value.
        """
        if not self.ranges.is_only(value, r):
            first = min(party for party in self.ranges.parties[value] if party is not None)
            if value in self.ranges.kept or r != first:
                return
        v = self._maker_of[value]
        specs = (
            self.candidates[v].specs(value)
            if v < len(self.candidates)
            else self.builder.variables[v].specs[value]
        )
        modes = [mode for mode in self.modes if mode not in _SAVING]
        self._charge(v, r, self._local_bytes(value, specs), *modes)

    @cached_property
    def _maker_of(self) -> Mapping[str, int]:
        received = self.builder.boundary_variables.items()
        found = {value: v for (side, value), v in received if side == "received"}
        for v, candidates in enumerate(self.candidates):
            for member in candidates.group.members:
                found |= dict.fromkeys(member.operator.outputs, v)
        return found

    def _local_bytes(self, value: str, specs: SpecColumn) -> Array:
        """[cases, choices]"""
        of_specs = self.cases.size_bytes(value)[:, None] / n_shards_of(specs.distinct, self.cases)
        found: Array = of_specs[:, specs.code]
        return found

    def _range_of(self, reshard: ReshardEdge) -> int | None:
        """The range of the first operator that reads the result, where the reshard runs."""
        place = self.ranges.place
        readers = (
            place[member.name]
            for v in reshard.readers
            for member in self.candidates[v].group.members
            if reshard.value in member.operator.inputs
        )
        return self.ranges.party_of.get(min(readers))

    def _run_reshard_again(self, reshard: ReshardEdge, variable: int | None) -> None:
        edge = self.builder.edges[reshard.edge]
        wanted = self.builder.variables[reshard.target].specs[reshard.value]
        found = self._edge_costs(reshard, edge)
        if found is None:
            return
        total_s, size_bytes = found
        if variable is None:
            self.builder.edges[reshard.edge] = replace(edge, cost_s=total_s, bytes=size_bytes)
            return
        n_modes, n_specs = len(self.modes), len(wanted.distinct)
        pairs = self._variable(f"{reshard.value} again", n_specs * n_modes)
        self.builder.edges[reshard.edge] = Edge(edge.u, pairs, total_s, size_bytes, edge.rows, None)
        spec_of, mode_of = _pair_codes(n_specs, n_modes)
        self._add_equality(pairs, spec_of, reshard.target, wanted.code, n_specs)
        self._add_equality(variable, np.arange(n_modes), pairs, mode_of, n_modes)

    def _edge_costs(self, reshard: ReshardEdge, edge: Edge) -> tuple[Array, Array] | None:
        """Seconds and bytes of an edge: [cases, specs made, pairs (spec wanted, mode)].

        None if nothing runs again. Equal edges have the same arrays.
        """
        made, wanted = (
            self.builder.variables[v].specs[reshard.value] for v in (reshard.source, reshard.target)
        )
        again = self._paths(self.builder.tables(reshard.value), made, wanted)
        sums_s = self._sums.get(reshard.value)
        handed = self._handed(reshard)
        decides = None if handed is None else self._decisive(handed) == reshard.value
        arrays = (edge.cost_s, again, sums_s, wanted)
        is_saved = reshard.edge in self._saved_edges
        key = (*map(id, arrays), decides, is_saved)  # all these arrays are kept alive
        if key not in self._in_modes_of:
            cost_s, size_bytes = self._mode_costs(reshard, again, handed)
            total_s = edge.cost_s[..., None] + cost_s
            shape = (*total_s.shape[:2], -1)
            self._in_modes_of[key] = (
                (self._intern(total_s.reshape(shape)), self._intern(size_bytes.reshape(shape)))
                if cost_s.any() or size_bytes.any()
                else None
            )
        return self._in_modes_of[key]

    def _handed(self, reshard: ReshardEdge) -> str | None:
        """The result of a matmul of its own range that it reads, if reshards decide whether that is
        saved."""
        r, value = self._range_of(reshard), self.ranges.matmul_of.get(reshard.value)
        if r is None or value is None or not self.ranges.is_only(value, r):
            return None
        v = self._maker_of[value]
        i = self.ranges.place[self.candidates[v].group.name]
        is_made = value in self.ranges.analysis.operators[i].outputs
        if not is_made or self.ranges.party_of.get(i) != r:
            return None
        return value if self._is_handed_on(v, r, value, self._is_kept(v, i)) else None

    def _mode_costs(
        self, reshard: ReshardEdge, again: RerunCosts, handed: str | None
    ) -> tuple[Array, Array]:
        """Seconds of a step, and bytes: [cases, specs made, specs wanted, modes]."""
        m, value = self.cases.n_microbatches[:, None, None], reshard.value
        kept_bytes = again.kept_bytes
        if handed is not None and self._decisive(handed) != value:
            kept_bytes = np.zeros_like(kept_bytes)
        elif handed is not None:
            made = self.candidates[reshard.source].specs(value).distinct
            own = self.cases.size_bytes(value)[:, None] / n_shards_of(made, self.cases)
            kept_bytes = kept_bytes + np.where(again.calls > 0, 0.0, own[..., None])
        apart_s = again.local_s * m
        if value in self._sums:
            column = self.builder.variables[reshard.target].specs[value]
            first = [int(np.argmax(column.code == k)) for k in range(len(column.distinct))]
            apart_s = apart_s + np.where(again.moves > 0, self._sums[value][:, None, first], 0.0)
        nothing = saved_bytes = gathers_s = np.zeros_like(kept_bytes)
        if reshard.edge in self._saved_edges and "gathers" in self.modes:
            saved_bytes, is_gathered = self._saved_bytes(reshard)
            gathers_s = np.where(is_gathered, again.forward_s * m, 0.0)
        seconds = {None: nothing, "selective": apart_s, "gathers": gathers_s}
        sizes = {"selective": kept_bytes, "gathers": saved_bytes}
        return (
            np.stack([seconds.get(mode, again.forward_s * m) for mode in self.modes], axis=-1),
            np.stack([sizes.get(mode or "none", nothing) for mode in self.modes], axis=-1),
        )

    def _saved_bytes(self, reshard: ReshardEdge) -> tuple[Array, BoolArray]:
        """What "gathers" saves of a result, and is it gathered again? [cases, specs made, specs
        wanted]: a shard instead of what is made of it, if that is larger."""
        made, wanted = (
            self.cases.size_bytes(reshard.value)[:, None] / n_shards_of(specs, self.cases)
            for specs in (
                self.builder.variables[v].specs[reshard.value].distinct
                for v in (reshard.source, reshard.target)
            )
        )
        made, wanted = np.broadcast_arrays(made[:, :, None], wanted[:, None, :])
        return np.minimum(made, wanted), made < wanted

    @once
    def _paths(self, tables: ReshardTables, made: SpecColumn, wanted: SpecColumn) -> RerunCosts:
        return rerun_costs(tables, self.cases, made.distinct, wanted.distinct)

    def _mode_variable(self, r: int) -> int | None:
        """Add a range's mode variable; None if there is a single mode."""
        if len(self.modes) == 1:
            return None
        name = self.ranges.analysis.operators[self.ranges.full[r].start].name
        variable = self._variable(f"{name} recomputed", len(self.modes))
        own = self.builder.variables[variable]
        own.cost_s = self.builder.add_ties(own.cost_s, _MODE_TIE * np.arange(len(self.modes))[None])
        return variable

    def _variable(self, name: str, n_choices: int) -> int:
        zero = self.builder.priced.placed.zeros(n_choices)
        self.builder.variables.append(BuiltVariable(name, zero, zero))
        return len(self.builder.variables) - 1

    def _join(self, v: int, r: int, variable: int | None, cost_s: Array, size_bytes: Array) -> None:
        """Add what a variable's choices cost in every mode of a range."""
        if variable is None:
            own = self.builder.variables[v]
            own.cost_s = own.cost_s + cost_s[:, 0]
            own.size_bytes = self._intern(own.size_bytes + size_bytes[:, 0])
            return
        begins_within = v < len(self.candidates) and (
            self.ranges.place[self.candidates[v].group.name] in self.ranges.full[r]
        )
        u, w = variable, v
        if not begins_within:  # v hands a value to the range, so the edge leads to the mode
            u, w = v, variable
            cost_s, size_bytes = (self._intern(a.swapaxes(1, 2)) for a in (cost_s, size_bytes))
        self.builder.edges.append(Edge(u, w, cost_s, size_bytes))

    def _add_equality(self, u: int, rows: Indices, v: int, columns: Indices, n: int) -> None:
        self.builder.edges.append(Edge(u, v, _equality(n), None, rows, columns))

    def _spend(self, v: int, r: int, seconds: Array, mode: Recompute | None) -> None:
        for k in self._places(mode):
            self._range_table(v, r)[0][:, k] += seconds

    def _charge(self, v: int, r: int, size_bytes: Array, *modes: Recompute | None) -> None:
        for k in self._places(*modes):
            self._range_table(v, r)[1][:, k] += size_bytes

    def _places(self, *modes: Recompute | None) -> Iterator[int]:
        """The indices of some of `modes`; "attention-core" runs again in full."""
        for k, own in enumerate(self.modes):
            if own in modes or (own == "attention-core" and "full" in modes):
                yield k

    def _range_table(self, v: int, r: int) -> tuple[Array, Array]:
        if (v, r) not in self._joined:
            n_choices = self.builder.variables[v].cost_s.shape[-1]
            shape = (len(self.cases), len(self.modes), n_choices)
            self._joined[v, r] = np.zeros(shape), np.zeros(shape)
        return self._joined[v, r]

    def _intern(self, array: Array) -> Array:
        """One array object for all equal arrays, so that equal blocks stay equal."""
        array = np.ascontiguousarray(array, dtype=np.float64)
        return self._interned.setdefault((array.shape, array.tobytes()), array)


@lru_cache(maxsize=64)
def _equality(n: int) -> Array:
    """Costs [1, n, n] that allow only equal choices."""
    return np.where(np.eye(n, dtype=bool), 0.0, np.inf)[None]


@lru_cache(maxsize=64)
def _pair_codes(n: int, m: int) -> tuple[Codes, Codes]:
    """[n * m]: the first and the second of every pair."""
    first, second = np.divmod(np.arange(n * m), m)
    return first, second
