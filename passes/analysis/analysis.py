"""What is known of a program before any mesh: notation, factors, batch, groups, what is saved.

The facts are computed once for the whole program. A stage (`cutting.py`) or a folded program
(`folding.py`) has a subset of the operators. Its `Analysis` reuses the facts of its `whole`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from autopar.caching import once
from autopar.cost.hardware import KernelMode
from autopar.errors import BatchError
from autopar.identity import Same
from autopar.measured import (
    Saved,
    Temporaries,
    description,
    saved_for_backward,
    storage_owners,
    temporaries,
)
from autopar.passes.analysis.gathering import Gathering, Gathers, gathering_of
from autopar.passes.analysis.groups import (
    OperatorGroup,
    PlacedOperator,
    form_groups,
    place_operators,
)
from autopar.passes.analysis.kernels import FusedTraffic, Kernels, fused_traffic
from autopar.passes.analysis.microbatch import Batch, find_batch
from autopar.placement import TensorType
from autopar.program.graph import Cell, Operator, Program, Types, operators_of, tensor_types
from autopar.rules import FUSED, rule_for

_STACK = "aten.stack.default"


class Neediest(NamedTuple):
    """An operator, and what it needs beside all that is saved, unsharded.

    temporaries   those of forward and of backward
    made          the inputs whose gradients it makes, and `made_bytes` of them
    later_bytes   what later operators save, which is freed when its backward begins
    """

    operator: str
    temporaries: Temporaries
    made: tuple[int, ...]
    made_bytes: float
    later_bytes: float

    @property
    def total_bytes(self) -> float:
        forward, backward = self.temporaries.forward_bytes, self.temporaries.backward_bytes
        return max(forward, backward + self.made_bytes) - self.later_bytes

    @property
    def least_bytes(self) -> float:
        """As `total_bytes`, whatever replaces the operator on shards."""
        return max(self.made_bytes - self.later_bytes, 0.0)


@dataclass(frozen=True, eq=False)
class Analysis:
    """The facts about a program that hold on every mesh; all plans of the program share them.

    `kinds` maps operator -> kind. Operators of one kind have the same calls, types, batch position
    and saved tensors, for every number of microbatches. They may differ in what they read.
    """

    program: Program
    operators: tuple[Operator, ...]
    types: Types
    batch: Batch
    saved: Mapping[str, Saved]
    kinds: Mapping[str, int]
    # Operator -> the first operator with an equal call (`autopar/measured/fake_calls.py`).
    _calls: Mapping[str, str] = field(repr=False, compare=False)
    _types: dict[int, Types] = field(default_factory=dict, repr=False, compare=False)
    # Equal calls and types -> one placed operator; filled for every number of microbatches.
    _patterns: dict[Hashable, PlacedOperator] = field(
        default_factory=dict, repr=False, compare=False
    )
    # The runs of each request to `folding.find_runs`.
    repeated: dict[tuple[int, bool], Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    whole: Analysis | None = field(default=None, repr=False, compare=False)
    # In a folded program: the parameters of all blocks, because they fill buckets together.
    parameter_names: frozenset[str] | None = field(default=None, repr=False, compare=False)
    # One of several stages, or a program of which they are made.
    gathers: Gathers = "whole"
    # Does every stage hold the activations of all microbatches at once?
    all_in_flight: bool = False

    @staticmethod
    def of(program: Program, batch_dims: Mapping[str, int | None] | None = None) -> Analysis:
        """Analyse a whole program; raises `MissingRuleError` for an operator without a rule."""
        operators = operators_of(program)
        types = tensor_types(program, operators, batch_dims)
        patterns: dict[Hashable, PlacedOperator] = {}
        placed = place_operators(operators, types.tensors, patterns)
        batch = find_batch(program, placed, types, batch_dims)
        calls = _alike_calls(program, operators)
        saved = saved_for_backward(program, calls) if program.training else {}
        kinds = _kinds(placed, batch, saved)
        return Analysis(program, operators, types, batch, saved, kinds, calls, _patterns=patterns)

    def part(self, program: Program) -> Analysis:
        """The facts about one stage of this program (`cutting.py`)."""
        names = {node.name for node in program.operators}
        return replace(
            self,
            program=program,
            operators=tuple(o for o in self.operators if o.name in names),
            whole=self,
            gathers="stages",
        )

    def set_schedule(self, name: str) -> Analysis:
        """The same program, planned for a schedule."""
        all_in_flight = name == "gpipe"
        is_other = all_in_flight != self.all_in_flight
        return replace(self, all_in_flight=all_in_flight) if is_other else self

    def set_gathers(self, gathers: Gathers) -> Analysis:
        """The same program, of which stages are to be made. It is folded later."""
        assert self.parameter_names is None, "folded already"
        return replace(self, whole=self, gathers=gathers)

    @cached_property
    def storage_owners(self) -> Mapping[str, str]:
        """Value -> the value that owns its storage: itself unless it is a view."""
        if self.whole:
            return self.whole.storage_owners
        return storage_owners(self.program, self._calls)

    @cached_property
    def kept_owners(self) -> Mapping[str, str]:
        """View -> the value of this program that owns its storage; without those that own theirs.

        What is saved for backward is a storage, even if a view shows a part of it.
        """
        own = {*self.program.parameters, *self.program.received}
        own |= {name for operator in self.operators for name in operator.outputs}
        return {
            name: owner
            for name, owner in self.storage_owners.items()
            if name != owner and name in own and owner in own
        }

    @cached_property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Value -> dtype; cached because reading the dtype of a fake tensor is slow."""
        return self.whole.dtypes if self.whole else _dtypes(self.program)

    @cached_property
    def temporaries(self) -> Mapping[str, Temporaries]:
        """Operator -> its temporary buffers."""
        if self.whole:
            return self.whole.temporaries
        return temporaries(self.program, self._calls)

    @cached_property
    def neediest(self) -> Neediest:
        """The operator that needs most when its backward begins; mostly the loss."""
        if self.whole and self.operators[-1] is self.whole.operators[-1]:
            return self.whole.neediest
        needs, later_bytes, tensors = list[Neediest](), 0.0, self.types.tensors
        kept = self.kept_by_operator(self.batch.n_accumulated)
        for operator, kept_bytes in zip(self.operators[::-1], kept[::-1], strict=True):
            needed = self.temporaries[operator.name]
            made = tuple(
                i
                for i, name in enumerate(operator.inputs)
                if tensors[name].has_grad and i not in needed.passed
            )
            made_bytes = sum(tensors[operator.inputs[i]].size_bytes for i in made)
            needs.append(Neediest(operator.name, needed, made, made_bytes, later_bytes))
            later_bytes += kept_bytes
        return max(needs, key=lambda of: of.total_bytes)

    @cached_property
    def parameter_views(self) -> frozenset[str]:
        """The parameters, their views, and stacks of them, such as of experts."""
        found = set(self.program.parameters)
        for operator in self.operators:
            is_view = rule_for(str(operator.call.op)).view or str(operator.call.op) == _STACK
            if is_view and found.issuperset(operator.inputs):
                found.update(operator.outputs)
        return frozenset(found)

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, unsharded."""
        names = self.parameter_names or self.program.parameters
        return sum(self.types.tensors[n].size_bytes for n in names)

    @cached_property
    def gathering(self) -> Mapping[str, Gathering]:
        """What is known of every parameter's collectives."""
        if self.parameter_names is not None and self.whole is not None:
            return {name: self.whole.gathering[name] for name in self.program.parameters}
        saved = {
            o.name: [self.storage_owners.get(o.inputs[k], o.inputs[k]) for k in found.inputs]
            for o in self.operators
            if (found := self.saved.get(o.name)) is not None
        }
        return gathering_of(self.program, self.operators, self.types.tensors, saved, self.gathers)

    @cached_property
    def bias_adds(self) -> Mapping[str, str]:
        """Operator that only adds a bias to the result of a matmul -> that result.

        The two run as one unless a reshard is between them (`passes/lowering/fusion.py`).
        """
        n_reads = Counter(name for operator in self.operators for name in operator.inputs)
        tensors, found = self.types.tensors, dict[str, str]()
        makers = {n: str(o.call.op) for o in self.operators for n in o.outputs}
        for operator in self.operators:
            if str(operator.call.op) != "aten.add.Tensor" or len(operator.inputs) != 2:
                continue
            for value, bias in (operator.inputs, operator.inputs[::-1]):
                if bias not in self.program.parameters or makers.get(value) not in FUSED:
                    continue
                if tensors[bias].shape == tensors[value].shape[-1:] and n_reads[value] == 1:
                    found.setdefault(operator.name, value)
        return found

    def fused_traffic(self, kernels: KernelMode) -> Mapping[str, FusedTraffic]:
        """Operator -> what it moves as a part of a kernel; nothing for those that run alone."""
        return {} if kernels == "eager" else self._fused_traffic(kernels)

    @once
    def _fused_traffic(self, kernels: KernelMode) -> Mapping[str, FusedTraffic]:
        if self.whole and self.parameter_names is not None:  # folded: operands are in equal places
            return self.whole._fused_traffic(kernels)
        on = self.program, self.operators, self._kernels(kernels), self.types.tensors
        return fused_traffic(*on, self.saved, kernels)

    @once
    def _kernels(self, kernels: KernelMode) -> Kernels:
        if self.whole:
            return self.whole._kernels(kernels)
        return Kernels.of(self.program, self.operators, self.bias_adds, kernels)

    def kept_bytes(self, n_microbatches: int, again: frozenset[int] = frozenset()) -> float:
        """Bytes saved for backward by one microbatch, unsharded, without the operators `again`."""
        return sum(self.kept_by_operator(n_microbatches, again))

    @once
    def kept_by_operator(
        self, n_microbatches: int, again: frozenset[int] = frozenset()
    ) -> Sequence[float]:
        """`kept_bytes` of each operator; what several of them save counts for the first."""
        types, owners = self.microbatch_types(n_microbatches).tensors, self.kept_owners
        n_splits, seen = self.batch.n_splits(n_microbatches), {*self.program.parameters}
        out = [0.0] * len(self.operators)
        for i, o in enumerate(self.operators):
            saved = self.saved.get(o.name)
            if saved is None or i in again:
                continue
            names = (*(o.inputs[k] for k in saved.inputs), *(o.outputs[k] for k in saved.outputs))
            new = {owners.get(name, name) for name in names} - seen
            seen |= new
            out[i] = sum(types[n].size_bytes for n in new) + saved.other_bytes / n_splits
        return out

    def microbatch_types(self, n_microbatches: int) -> Types:
        """Types of one microbatch; raises `BatchError` when the batch does not divide."""
        if n_microbatches not in self._types:
            self._types[n_microbatches] = self._divide(n_microbatches)
        return self._types[n_microbatches]

    @once
    def placed_operators(self, n_microbatches: int) -> tuple[PlacedOperator, ...]:
        """Every operator with its strategies on one axis, at the sizes of one microbatch."""
        by_kind = self.placed_by_kind(n_microbatches)
        return tuple(by_kind[self.kinds[o.name]].of(o) for o in self.operators)

    @once
    def placed_by_kind(self, n_microbatches: int) -> Mapping[int, PlacedOperator]:
        """Kind -> one operator of `placed_operators`."""
        if self.whole:
            known = self.whole.placed_by_kind(n_microbatches)
            return {kind: known[kind] for kind in self._distinct}
        tensors = self.microbatch_types(n_microbatches).tensors
        placed = place_operators(self._distinct.values(), tensors, self._patterns)
        return dict(zip(self._distinct, placed, strict=True))

    @cached_property
    def _distinct(self) -> Mapping[int, Operator]:
        """The first operator of each kind."""
        found: dict[int, Operator] = {}
        for operator in self.operators:
            found.setdefault(self.kinds[operator.name], operator)
        return found

    def notation_sizes(self, n_microbatches: int) -> Mapping[str, Mapping[str, int]]:
        """Operator -> the size of each name of its notation, in one microbatch."""
        by_kind = self.placed_by_kind(n_microbatches)
        return {o.name: by_kind[self.kinds[o.name]].sizes for o in self.operators}

    @once
    def groups(self, n_microbatches: int) -> tuple[OperatorGroup, ...]:
        """The planning nodes, at the sizes of one microbatch."""
        return form_groups(self.program, self.placed_operators(n_microbatches))

    def _divide(self, n_microbatches: int) -> Types:
        if n_microbatches == 1:
            return self.types
        self.batch.check_divides(n_microbatches)
        if self.batch.n_splits(n_microbatches) == 1:
            return self.types
        for (tensor, (dim, factor)), names in self._row_types.items():
            size = tensor.dims[dim][factor]
            if size % n_microbatches:
                raise BatchError(
                    f"the model views its batch as factors of {size}, "
                    f"which {n_microbatches} microbatches do not divide",
                    where=names[0],
                    hint="choose fewer microbatches",
                )
        return self.types.divide_rows(self._row_types, n_microbatches)

    @cached_property
    def n_divisible(self) -> int:
        """Numbers of microbatches divide this one: the model views its batch as factors. 0: any."""
        sizes = (tensor.dims[dim][factor] for tensor, (dim, factor) in self._row_types)
        return math.gcd(*sizes)

    @cached_property
    def _row_types(self) -> Mapping[tuple[TensorType, Cell], Sequence[str]]:
        return self.types.by_cell(self.batch.cells)


def _alike_calls(program: Program, operators: Sequence[Operator]) -> dict[str, str]:
    """Operator -> the first operator with an equal call on equal tensors."""
    described: dict[str, int] = {}
    numbers: dict[Hashable, int] = {}
    firsts: dict[Hashable, str] = {}
    found: dict[str, str] = {}
    for operator in operators:
        inputs, node = operator.inputs, program.node(operator.name)
        for name in inputs:
            if name not in described:
                text = description(program, program.node(name))
                described[name] = numbers.setdefault(text, len(numbers))
        tensors = tuple((described[name], inputs.index(name)) for name in inputs)
        call = (operator.likeness, node.name in program.has_grad, tensors, tuple(node.kwargs))
        found[operator.name] = firsts.setdefault(call, operator.name)
    return found


def _kinds(
    placed: Sequence[PlacedOperator], batch: Batch, saved: Mapping[str, Saved]
) -> dict[str, int]:
    """Number operators by call, types, batch position and saved tensors."""
    numbers: dict[Hashable, int] = {}
    kinds: dict[str, int] = {}
    for item in placed:
        operator = item.operator
        cells = tuple(map(batch.cells.get, (*operator.inputs, *operator.outputs)))
        # Operators with equal calls and types share one pattern object (`place_operators`).
        kind = (Same(item.pattern), cells, saved.get(operator.name))
        kinds[operator.name] = numbers.setdefault(kind, len(numbers))
    return kinds


def _dtypes(program: Program) -> dict[str, torch.dtype]:
    """Value -> dtype; unused results are named as in `value_names`."""
    found: dict[str, torch.dtype] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            found[node.name] = value.dtype
        elif isinstance(value, (tuple, list)):
            results = ((i, r) for i, r in enumerate(value) if r is not None)
            found |= {f"{node.name}:{i}": result.dtype for i, result in results}
    return found


def compute_dtype(analysis: Analysis) -> torch.dtype:
    """The dtype in which most parameter elements are used; matmuls are priced in it."""
    return _most(analysis, {n: analysis.dtypes[n] for n in analysis.program.parameters})


@once
def stored_dtype(analysis: Analysis) -> torch.dtype:
    """The dtype in which most parameter elements are stored."""
    return _most(analysis, {n: info.dtype for n, info in analysis.program.parameters.items()})


def _most(analysis: Analysis, dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    counts: dict[torch.dtype, int] = {}
    for name, dtype in dtypes.items():
        if dtype.is_floating_point:
            shape = analysis.program.parameters[name].shape
            counts[dtype] = counts.get(dtype, 0) + torch.Size(shape).numel()
    return max(counts, key=counts.__getitem__) if counts else torch.float32
