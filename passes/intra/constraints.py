"""Which placements a plan may use: `forbid`, `force`, and the roles that a recipe gives mesh axes.

role "any"     the solver is free on this axis
role "data"    everything that has a batch shards it; nothing else is sharded (dp)
role "copy"    as "data", and parameters are whole on it: HSDP shards them on the other axes
role "context" everything with a dim that is neither batch nor a parameter's shards that, such as
               sequences; nothing else is sharded. Keys and values go round, or are gathered (cp)
role "tensor"  the batch is not sharded, and every matmul with a parameter shards that parameter if
               it can (tp). `sequence` is forbidden unless the recipe has sequence parallelism; with
               it, everything else that can be sharded is

Whole experts are divided over the `expert_axes` of a recipe: those of role "data" or "context",
where their rows travel to them (ep), or of role "tensor". Nowhere else.

Without sequence parallelism, role "tensor" is exactly Megatron's layout, with the collectives of a
hand-written Megatron. Where several strategies fit:

    a parameter is used S or I, never R, so that its gradient needs no synchronisation
    a table looked up by the model's inputs, and a loss over classes, shard the vocabulary;
    a table looked up by constants (positions) stays whole

Recipes of role "tensor" are solved on an abstract machine, where splitting always pays
(`recipe_cost`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from autopar.cost.laws import CostModel
from autopar.mesh import Device, Link, LogicalMesh
from autopar.passes.analysis import JointStrategy, OperatorGroup, PlacedOperator
from autopar.placement import Placement, S, Spec
from autopar.program.graph import Program
from autopar.program.lines import Period, Storage
from autopar.rules import rule_for

Role = Literal["any", "data", "copy", "context", "tensor"]
# Roles that split the batch.
SPLIT_BATCH: tuple[Role, ...] = ("data", "copy")
# Roles over which ZeRO shards what all ranks have.
ZERO_SHARDS: tuple[Role, ...] = ("data", "context")
# What the axes of the Megatron recipe do, by their names.
_ROLES: dict[str, Role] = {"dp": "data", "ep": "data", "cp": "context", "tp": "tensor"}


def recipe_roles(names: Iterable[str]) -> tuple[Role, ...]:
    """What axes of these names do in the Megatron recipe."""
    return tuple(_ROLES[name] for name in names)


@dataclass(frozen=True)
class AxisPin:
    """`force`: a parameter's storage and use on one axis; None leaves it free."""

    storage: Placement | None
    use: Placement | None
    axis: int


@dataclass(frozen=True)
class Constraints:
    """Constraints on the choices of one stage.

    zero       recipes only, the storage on "data" and "context" axes: 0 replicated, 1 to 3 sharded
               with the period of that ZeRO stage
    pins       by the parameter's placeholder
    storage    fixes a parameter's storage outright, so that evaluation uses the shards of training
    expert_axes   recipes only: the axes over which whole experts are divided (ep)
    """

    forbid: frozenset[str] = frozenset()
    roles: tuple[Role, ...] = ()
    zero: int | None = None
    pins: Mapping[str, tuple[AxisPin, ...]] = field(default_factory=dict)
    storage: Mapping[str, Storage] = field(default_factory=dict)
    expert_axes: frozenset[int] = frozenset()

    def role(self, axis: int) -> Role:
        return self.roles[axis] if self.roles else "any"

    @property
    def is_recipe(self) -> bool:
        """Is every axis given a role, so that a recipe places the operators?"""
        return bool(self.roles) and "any" not in self.roles

    def on_view(self, view: LogicalMesh) -> Constraints:
        """The same recipe on a view of other axes, which may have cp; the same for a search."""
        return replace(self, roles=recipe_roles(view.names)) if self.is_recipe else self

    @property
    def prefers_sharding(self) -> bool:
        """Are placements chosen on the abstract machine? Data parallelism leaves nothing to it."""
        return "tensor" in self.roles

    def n_static_shares(self, sizes: Sequence[int]) -> int:
        """Upper bound on the ranks that parameters and their state are divided over.

        Data parallelism without ZeRO keeps all of them on every rank.
        """
        whole = (*SPLIT_BATCH, "context") if self.zero == 0 else ("copy",)
        return math.prod(
            n for a, n in enumerate(sizes) if self.role(a) not in whole or a in self.expert_axes
        )


@dataclass(frozen=True)
class AppliedConstraints:
    """Constraints applied to a program whose batch and factor classes are known."""

    constraints: Constraints
    parameters: frozenset[str]
    batch_cells: Mapping[str, tuple[int, int]]
    classes: Mapping[str, tuple[tuple[int, ...], ...]]
    parameter_classes: frozenset[int]
    whole: frozenset[str]  # model inputs and constants
    constants: frozenset[str]
    parameter_views: frozenset[str]  # parameters, views and stacks of them

    @staticmethod
    def of(
        constraints: Constraints,
        program: Program,
        batch_cells: Mapping[str, tuple[int, int]],
        classes: Mapping[str, tuple[tuple[int, ...], ...]],
        parameter_views: frozenset[str],
    ) -> AppliedConstraints:
        parameters = frozenset(program.parameters)
        # Not all views: one that is expanded to the rows has their class.
        stacks = [
            n.name
            for n in program.graph.nodes
            if n.target is torch.ops.aten.stack.default and n.name in parameter_views
        ]
        return AppliedConstraints(
            constraints,
            parameters,
            batch_cells,
            classes,
            frozenset(c for p in (*parameters, *stacks) for dim in classes[p] for c in dim),
            frozenset(n.name for n in program.graph.nodes if n.op == "placeholder")
            - parameters
            - set(program.received),
            frozenset(program.constants),
            parameter_views,
        )

    def facts_of(self, value: str) -> Hashable:
        """All that decides what a value may do; values of equal facts and type may do the same."""
        classes = self.parameter_classes
        of_parameters = tuple([c in classes for dim in self.classes[value] for c in dim])
        return (
            self.batch_cells.get(value),
            of_parameters,
            value in self.parameters,
            value in self.whole,
            value in self.constants,
            value in self.parameter_views,
            self.constraints.pins.get(value, ()),
            self.constraints.storage.get(value),
        )

    def allowed(
        self, group: OperatorGroup, axis: int, joints: Sequence[JointStrategy]
    ) -> list[JointStrategy]:
        """The strategies that a group may use on an axis."""
        forbid, role = self.constraints.forbid, self.constraints.role(axis)
        kept = [j for j in joints if not self._is_partial_input(group, j)]
        if "data" in forbid or role in ("context", "tensor"):
            kept = [j for j in kept if not self._shards_batch(j)]
        if "tensor" in forbid:
            kept = [j for j in kept if not self._shards_parameter(j)]
        if "sequence" in forbid:
            kept = [j for j in kept if not self._shards_other(j)]
        if "expert" in forbid:
            kept = [j for j in kept if not self._shards_experts(group, j)]
        experts = self._divided_experts(group, joints) if role != "any" else frozenset[int]()
        divides = axis in self.constraints.expert_axes
        if role == "context":
            whole = (j for j in kept if not self._shards_parameter(j))
            kept = [*whole, *(j for j in kept if divides and id(j) in experts)]
        if role in SPLIT_BATCH or role == "context":
            splits = self._shards_other if role == "context" else self._shards_batch
            kept = [*filter(splits, kept)] or [j for j in kept if not _shards_something(j)]
        if experts:
            kept = _prefer(lambda j: (id(j) in experts) == divides, kept)
        return [j for j in kept if self._respects_pins(group, j, axis)]

    def preferred(
        self, group: OperatorGroup, axis: int, joints: Sequence[JointStrategy]
    ) -> list[JointStrategy]:
        """The strategies that the axis's role prefers, or all if none is preferred.

        Cost alone would not give Megatron's layout: a small model would rather shard its sequence
        and replicate its weights, or keep its norms whole, so that their scales need no
        synchronisation.
        """
        if self.constraints.role(axis) != "tensor":
            return list(joints)
        rule = rule_for(str(group.members[0].operator.call.op))
        strict = "sequence" in self.constraints.forbid
        kept = list(joints)
        if rule.flops is not None:
            kept = _prefer(self._shards_parameter, kept)
        elif not strict:
            kept = _prefer(_shards_something, kept)
        elif rule.lower and group.members[0].operator.inputs[0] in self.parameters:
            kept = _prefer(lambda j: self._cuts_vocabulary(group, j), kept)
        return _prefer(lambda j: not self._replicates_parameter(j), kept) if strict else kept

    def _cuts_vocabulary(self, group: OperatorGroup, joint: JointStrategy) -> bool:
        """Is a lookup as in Megatron: a token table sharded by rows, a position table whole?"""
        (member,), (chosen,) = group.members, joint.members
        if member.operator.inputs[1] in self.constants:
            return not _shards_something(joint)
        return member.strategies[chosen].lowering is not None

    def _replicates_parameter(self, joint: JointStrategy) -> bool:
        return any(p.kind == "R" and n in self.parameters for n, p in joint.placements.items())

    def _is_partial_input(self, group: OperatorGroup, joint: JointStrategy) -> bool:
        """Model inputs and constants are whole on every rank, never partial sums."""
        return any(joint.placements[n].kind == "P" for n in group.inputs if n in self.whole)

    def _shards_batch(self, joint: JointStrategy) -> bool:
        return any(
            p.is_shard and self.batch_cells.get(n) == p.cell for n, p in joint.placements.items()
        )

    def _shards_parameter(self, joint: JointStrategy) -> bool:
        return any(p.is_shard and n in self.parameters for n, p in joint.placements.items())

    def _shards_other(self, joint: JointStrategy) -> bool:
        return any(
            p.is_shard
            and self.batch_cells.get(n) != p.cell
            and self.classes[n][p.dim][p.factor] not in self.parameter_classes
            for n, p in joint.placements.items()
        )

    def _divided_experts(
        self, group: OperatorGroup, joints: Sequence[JointStrategy]
    ) -> frozenset[int]:
        """Ids of the strategies that divide experts by a rule of experts."""
        rules = (rule_for(str(member.operator.call.op)) for member in group.members)
        if not any(rule.uneven_names for rule in rules):
            return frozenset()
        return frozenset(id(j) for j in joints if self._shards_experts(group, j))

    def _shards_experts(self, group: OperatorGroup, joint: JointStrategy) -> bool:
        return any(
            joint.placements[name] == S(*cell)
            for member in group.members
            for name, cell in self._expert_cells(member)
        )

    def _expert_cells(self, member: PlacedOperator) -> Iterator[tuple[str, tuple[int, int]]]:
        """The cells of a matmul's parameters that count matrices, such as experts.

        Rules of experts say which name that is. Else a feature of a parameter is either in the
        other input, and summed over, or in the result; a name in both (an einsum over experts) or
        in neither has one matrix per element.
        """
        operator, notation = member.operator, member.operator.notation
        rule = rule_for(str(operator.call.op))
        if rule.flops is None:
            return
        for i, name in enumerate(operator.inputs):
            if name not in self.parameter_views:
                continue
            others = [t for k, t in enumerate(notation.inputs) if k != i]
            counting = rule.uneven_names or {
                n
                for (n,) in (dim for dim in notation.inputs[i] if len(dim) == 1)
                if any((n,) in t for t in others) == any((n,) in t for t in notation.outputs)
            }
            for label, (cells, _) in member.pattern.labels.items():
                cell = cells[i]
                if cell and member.pattern.names[label] in counting:
                    yield name, cell

    def _respects_pins(self, group: OperatorGroup, joint: JointStrategy, axis: int) -> bool:
        return all(
            pin.use is None or joint.placements[name] == pin.use
            for name in group.inputs
            for pin in self.constraints.pins.get(name, ())
            if pin.axis == axis
        )

    def storage_allowed(self, parameter: str, storage: Storage) -> bool:
        """May a parameter be stored like this, whatever its use?"""
        for pin in self.constraints.pins.get(parameter, ()):
            if pin.storage is not None and storage.spec.placements[pin.axis] != pin.storage:
                return False
        return True

    def period_allowed(self, period: Period, gathers: bool, is_recipe: bool) -> bool:
        """May a parameter be converted with this period, in a conversion that `gathers` it?"""
        forbid, zero = self.constraints.forbid, self.constraints.zero
        if not gathers:
            return period == "step"
        level = {"step": 1, "micro": 2, "use": 3}[period]
        return f"zero{level}" not in forbid and (zero in (None, level) or not is_recipe)

    def fits_recipe(self, stored: Spec, use: Spec) -> bool:
        """With a given `zero`: is it sharded for storage alone only on axes of `ZERO_SHARDS`?"""
        return all(
            kept == used
            if used.is_shard
            else not kept.is_shard or self.constraints.role(axis) in ZERO_SHARDS
            for axis, (kept, used) in enumerate(zip(stored.placements, use.placements, strict=True))
        )


def _shards_something(joint: JointStrategy) -> bool:
    return any(p.is_shard for p in joint.placements.values())


def _prefer(
    wanted: Callable[[JointStrategy], bool], joints: Sequence[JointStrategy]
) -> list[JointStrategy]:
    """The joints for which `wanted` holds, or all if there are none."""
    return [j for j in joints if wanted(j)] or list(joints)


def recipe_cost(cost: CostModel) -> CostModel:
    """A machine where FLOPs cost most, then bytes sent between ranks, then bytes touched.

    The Megatron layout is the optimum in that order: shard every matmul that can be sharded, with
    the least communication. With real rates, small models would replicate.
    """
    mesh = cost.mesh
    machine = Device(flops_per_s=1.0, bytes_per_s=1e3, memory_bytes=mesh.device.memory_bytes)
    links = (Link(1.0, 1.0),) * mesh.n_axes
    view = LogicalMesh(mesh.sizes, mesh.names, links, machine, mesh.first_rank)
    return CostModel(view, cost.dtype, imbalance=cost.imbalance, lengths=cost.lengths)
