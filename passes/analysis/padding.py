"""Which vocabularies are padded to divide over the ranks, and the padded program.

A vocabulary is a class of factors (`program/graph/factors.py`): the row dim of an embedding's
table, or the class dim of a cross-entropy. In a tied language model it is a dim of the embedding,
of the head's weight and bias, and of the logits. Its V elements become V' = n ceil(V / n) for n
ranks, in every dim of the class. Elements beyond V may hold any finite value if two conditions hold
for every operator that touches the class:

    1. no result below V depends on an input beyond V
    2. if gradients of results are 0 beyond V, so are gradients of inputs; and a result without
       the class sends gradient 0 to inputs beyond V

(1) holds for every name that a rule lets shard without communication, because shards of results
then depend only on the same shards of inputs. (2) is 0 times a derivative, so it holds for linear
operators and for functions with finite derivatives (`_FINITE`). Two operators end the class: their
padded forms (`autopar/rules/padded.py`) read no row and no class beyond V. Any other operator is an
obstacle, and the class is not padded (`Paddings.refused`). Neither is a class that padding would
lengthen by more than `_MOST_ADDED`.

Parameters start with zeros beyond V, and their gradient there is exactly 0. So an elementwise
optimizer keeps the zeros, and they add nothing to a gradient norm. State is saved and loaded
without padding (`runtime/tensors/sharding.py`), and the user gets outputs cut to V
(`Program.rebuild`). A class that the plan does not shard is not padded (`Paddings.used`).

A program that is placed by an existing plan (evaluation, other shapes) must take the plan's padded
parameters. If one of its operators is an obstacle, it cuts the parameter to V before its first use:
a slice, whose gradient is 0 beyond V.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F

from autopar.errors import PlanError
from autopar.passes.analysis.arguments import override
from autopar.placement import Spec
from autopar.program.graph import Operator, Program, operators_of, tensor_types
from autopar.rules import MATMULS, N_VALID, PADDED, VIEWS, rule_for

Shape = tuple[int, ...]
Cell = tuple[str, int]  # a value and one of its dims

# Padding may add at most this share of a dim; so 3 classes on 8 ranks stay 3.
_MOST_ADDED = 0.125

_SLICE = torch.ops.aten.slice.Tensor
_DIVISION = "aten.div.Tensor"
# Linear operators, and functions with finite derivatives.
_FINITE_NAMES = (
    "add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar mul.Tensor mul.Scalar div.Tensor "
    "div.Scalar neg.default tanh.default sigmoid.default relu.default gelu.default silu.default "
    "clone.default contiguous.default detach.default alias.default to.dtype to.dtype_layout "
    "_to_copy.default type_as.default"
).split()
_FINITE = frozenset(f"aten.{name}" for name in _FINITE_NAMES) | {r.op for r in (*MATMULS, *VIEWS)}


@dataclass(frozen=True)
class Paddings:
    """What may be padded.

    shapes    parameter -> its padded shape
    refused   parameter -> why one of its vocabularies is not padded
    cells     parameter -> all cells of its padded classes, in the whole graph
    """

    shapes: Mapping[str, Shape]
    refused: Mapping[str, str]
    cells: Mapping[str, frozenset[Cell]] = field(default_factory=dict)

    def used(self, specs: Iterable[tuple[str, Spec]]) -> dict[str, Shape]:
        """The padded shapes that a plan needs: a value with the class is sharded there."""
        sharded = {(value, p.dim) for value, spec in specs for p in spec.placements if p.is_shard}
        return {name: s for name, s in self.shapes.items() if self.cells[name] & sharded}


def find_paddings(program: Program, n_ranks: int) -> Paddings:
    """The parameters whose vocabulary can be padded for `n_ranks`, and why others cannot.

    Raises `MissingRuleError` for an operator without a rule.
    """
    return _find(program, n_ranks)[0]


def pad_for_ranks(program: Program, n_ranks: int) -> tuple[Program, Paddings]:
    """The program with everything padded that `find_paddings` finds, and what it found.

    Raises `MissingRuleError` for an operator without a rule.
    """
    found, classes = _find(program, n_ranks)
    return _pad(program, found.shapes, classes), found


def _find(program: Program, n_ranks: int) -> tuple[Paddings, _Classes | None]:
    """What may be padded, and the classes it was found in; None if every dim divides."""
    uneven = any(n % n_ranks for info in program.parameters.values() for n in info.shape)
    if not uneven:
        return Paddings({}, {}), None
    classes = _Classes(program)
    shapes: dict[str, list[int]] = {}
    refused: dict[str, str] = {}
    cells: dict[str, set[Cell]] = {}
    for number, size in classes.vocabularies().items():
        if size % n_ranks == 0:
            continue
        padded = math.ceil(size / n_ranks) * n_ranks
        obstacle = classes.obstacle(number)
        if padded - size > _MOST_ADDED * size:
            obstacle = f"padding it to {padded} adds more than {_MOST_ADDED:.1%}"
        for value, dim in classes.parameters(number):
            info = program.parameters[value]
            if obstacle is None:
                shapes.setdefault(info.name, list(info.shape))[dim] = padded
                cells.setdefault(info.name, set()).update(classes.cells[number])
            else:
                refused[info.name] = (
                    f"dim {dim} of {size} is not sharded over {n_ranks} ranks: {obstacle}"
                )
    found = Paddings(
        {name: tuple(shape) for name, shape in shapes.items()},
        refused,
        {name: frozenset(held) for name, held in cells.items()},
    )
    return found, classes


def pad(program: Program, shapes: Mapping[str, Sequence[int]]) -> Program:
    """The program over parameters padded to `shapes`, with the same results and gradients.

    `ParameterInfo.shape` stays the user's. Raises `PlanError` for a shape that is shorter or has
    other dims.
    """
    return _pad(program, shapes, None)


def _pad(
    program: Program, shapes: Mapping[str, Sequence[int]], classes: _Classes | None
) -> Program:
    wanted: dict[Cell, int] = {}
    for value, info in program.parameters.items():
        shape = shapes.get(info.name, info.shape)
        shorter = any(new < old for new, old in zip(shape, info.shape, strict=False))
        if shorter or len(shape) != len(info.shape):
            raise PlanError(f"{info.name} {list(info.shape)} cannot be padded to {list(shape)}")
        added = [dim for dim, size in enumerate(shape) if size > info.shape[dim]]
        wanted |= {(value, dim): shape[dim] for dim in added}
    if not wanted:
        return program
    classes = classes or _Classes(program)
    sizes = dict(wanted)
    cut: dict[str, list[int]] = {}
    for (value, dim), size in wanted.items():
        number = classes.number(value, dim)
        held = classes.parameters(number) if number is not None else []
        together = {wanted.get(cell) for cell in held} == {size}
        if number is None or not together or classes.obstacle(number) is not None:
            cut.setdefault(value, []).append(dim)
        else:
            sizes |= dict.fromkeys(classes.cells[number], size)
    return _Padded(classes, sizes, cut).program()


class _Classes:
    """The factor classes of a program.

    cells     class -> the cells that are one factor of it, alone in their dim
    inside    class -> a value with a dim in which it is one factor among several
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.operators = operators_of(program)
        self.types = tensor_types(program, self.operators)
        self.cells: dict[int, set[Cell]] = {}
        self.inside: dict[int, str] = {}
        for value, dims in self.types.classes.items():
            for dim, numbers in enumerate(dims):
                for number in numbers:
                    if len(numbers) == 1:
                        self.cells.setdefault(number, set()).add((value, dim))
                    else:
                        self.inside.setdefault(number, value)

    def number(self, value: str, dim: int) -> int | None:
        """The class of a dim with a single factor; None for other dims."""
        numbers = self.types.classes[value][dim]
        return numbers[0] if len(numbers) == 1 else None

    def parameters(self, number: int) -> list[Cell]:
        return sorted(c for c in self.cells[number] if c[0] in self.program.parameters)

    def vocabularies(self) -> dict[int, int]:
        """Class -> size, for every vocabulary."""
        found: dict[int, int] = {}
        for operator in self.operators:
            for value, dim in _vocabulary_cells(operator):
                number = self.number(value, dim)
                if number is not None:
                    found[number] = self.types.tensors[value].shape[dim]
        return found

    def obstacle(self, number: int) -> str | None:
        """Why padding this class is not known to be exact; None if it is."""
        if number in self.inside:
            return f"{self.program.where(self.inside[number])} sees it as a factor of a dim"
        for value, _ in sorted(self.cells[number]):
            if value in (*self.program.inputs, *self.program.buffers, *self.program.updates):
                return f"`{value}`, which is no parameter, has it"
        for operator in self.operators:
            if not _lets_pass(operator, self.cells[number]):
                return f"{operator.call.op} meets it at {self.program.where(operator.name)}"
        return None


def _named_cells(operator: Operator) -> list[tuple[str, Cell]]:
    """(name, cell) for every dim of an operator's values, inputs first."""
    notation = operator.notation
    terms = (*notation.inputs, *notation.outputs)
    return [
        (name, (value, dim))
        for term, value in zip(terms, (*operator.inputs, *operator.outputs), strict=True)
        for dim, names in enumerate(term)
        for name in names
    ]


def _vocabulary_cells(operator: Operator) -> list[Cell]:
    """The rows of an embedding's table, or the classes of a cross-entropy's logits."""
    if str(operator.call.op) not in PADDED:
        return []
    dims = enumerate(operator.notation.inputs[0])
    return [(operator.inputs[0], dim) for dim, names in dims if names == ("v",)]


def _lets_pass(operator: Operator, cells: Collection[Cell]) -> bool:
    """Is padding `cells` exact here: do (1) and (2) hold, or does a padded form end the class?"""
    named = _named_cells(operator)
    met = {name for name, cell in named if cell in cells}
    if not met or {cell for name, cell in named if name in met} == {*_vocabulary_cells(operator)}:
        return True
    op, notation = str(operator.call.op), operator.notation
    communicates = met & rule_for(op).lower.keys()
    divisor = notation.inputs[1] if op == _DIVISION and len(notation.inputs) > 1 else ()
    return (
        op in _FINITE
        and not met & notation.frozen
        and not communicates
        and not any(met & set(names) for names in divisor)
        and all(cell in cells for name, cell in named if name in met)
        and all(met <= {n for names in term for n in names} for term in notation.outputs)
    )


class _Padded:
    """Builds the padded program; `sizes` maps cell -> padded size.

    A parameter in `cut` is padded alone: its readers read a slice of it.
    """

    def __init__(
        self, classes: _Classes, sizes: Mapping[Cell, int], cut: dict[str, list[int]]
    ) -> None:
        self.old = classes.program
        self.operators = {operator.name: operator for operator in classes.operators}
        self.sizes, self.cut = sizes, cut
        self.graph = torch.fx.Graph()
        self.made: dict[torch.fx.Node, torch.fx.Node] = {}
        self.keys = dict(self.old.keys)
        self.has_grad = set(self.old.has_grad)
        self.mode = next(iter(self.old.graph.nodes)).meta["val"].fake_mode

    def program(self) -> Program:
        old = self.old
        for node in old.graph.nodes:
            if node.op == "output":
                self.graph.output(self._map(node.args[0]))
            elif node.op == "placeholder":
                self.made[node] = self._placeholder(node)
            else:
                self._cut_parameters(node)
                self.made[node] = self._call(node)
        return replace(
            old,
            graph=self.graph,
            constants={
                name: partial(_lengthen, make, self._shape(name))
                if self._shape(name) != self._old_shape(name)
                else make
                for name, make in old.constants.items()
            },
            has_grad=frozenset(self.has_grad),
            keys=self.keys,
            valid_sizes={
                name: {d: n for d, n in enumerate(self._old_shape(name)) if (name, d) in self.sizes}
                for name in old.outputs
            },
            _by_name={},
        )

    def _old_shape(self, value: str) -> Shape:
        return tuple(self.old.node(value).meta["val"].shape)

    def _shape(self, value: str) -> Shape:
        return self._resize(value, self._old_shape(value))

    def _resize(self, value: str, shape: Shape) -> Shape:
        return tuple(self.sizes.get((value, dim), n) for dim, n in enumerate(shape))

    def _map(self, arguments: Any) -> Any:
        return torch.fx.node.map_arg(arguments, self.made.__getitem__)

    def _placeholder(self, node: torch.fx.Node) -> torch.fx.Node:
        new = self.graph.create_node("placeholder", node.name, name=node.name)
        new.meta = dict(node.meta)
        shape = self._shape(node.name)
        if shape != self._old_shape(node.name):
            with self.mode:
                new.meta["val"] = torch.empty(shape, dtype=node.meta["val"].dtype)
        return new

    def _cut_parameters(self, reader: torch.fx.Node) -> None:
        """Slice the parameters in `cut` that `reader` is the first to read."""
        for source in reader.all_input_nodes:
            for dim in self.cut.pop(source.name, ()):
                whole, n_valid = self.made[source], source.meta["val"].shape[dim]
                new = self.graph.call_function(_SLICE, (whole, dim, 0, n_valid))
                new.meta["val"] = self._run(new)
                module, _, name = self.old.parameters[source.name].name.rpartition(".")
                self.keys[new.name] = f"{module}/valid_{name}#{dim}"
                if source.name in self.has_grad:
                    self.has_grad.add(new.name)
                self.made[source] = new

    def _call(self, node: torch.fx.Node) -> torch.fx.Node:
        operator = self.operators.get(node.name)
        if operator is None:  # getitem: one of several results
            new = self.graph.node_copy(node, self.made.__getitem__)
            source, index = new.args
            assert isinstance(source, torch.fx.Node)
            assert isinstance(index, int)
            new.meta["val"] = source.meta["val"][index]
        elif {cell for _, cell in _named_cells(operator)} & self.sizes.keys():
            target, args, kwargs = self._lengthened_call(node, operator)
            new = self.graph.create_node(
                "call_function", target, self._map(args), self._map(kwargs), name=node.name
            )
            new.meta = {**node.meta, "val": self._run(new)}
            self._check(operator, new)
        else:
            new = self.graph.node_copy(node, self.made.__getitem__)
        assert new.name == node.name, (new.name, node.name)
        return new

    def _lengthened_call(
        self, node: torch.fx.Node, operator: Operator
    ) -> tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]:
        """An operator's target and arguments, with padded sizes in the arguments."""
        call, rule = operator.call, rule_for(str(operator.call.op))
        args, kwargs = tuple(node.args), dict(node.kwargs)
        if rule.localise is not None:
            inputs, outputs = self._shapes(operator)
            args, kwargs = override(node, args, kwargs, rule.localise(call, inputs, outputs))
        for value, dim in _vocabulary_cells(operator):
            if (value, dim) in self.sizes:
                return PADDED[rule.op][0], args, {**kwargs, N_VALID: call.inputs[0][dim]}
        return call.op, args, kwargs

    def _shapes(self, operator: Operator) -> tuple[list[Shape], list[Shape]]:
        """An operator's input and output shapes, with padding."""
        call = operator.call
        inputs = zip(operator.inputs, call.inputs, strict=True)
        outputs = zip(operator.outputs, call.outputs, strict=True)
        return [self._resize(*i) for i in inputs], [self._resize(*o) for o in outputs]

    def _run(self, node: torch.fx.Node) -> Any:
        value_of = lambda n: n.meta["val"]  # noqa: E731
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value_of)
        assert callable(node.target)
        with self.mode, torch.no_grad():
            return node.target(*args, **kwargs)

    def _check(self, operator: Operator, node: torch.fx.Node) -> None:
        """Assert that the results have the shapes that the classes predict."""
        value = node.meta["val"]
        results = value if isinstance(value, (tuple, list)) else (value,)
        found = [tuple(r.shape) for r in results if r is not None]
        assert found == self._shapes(operator)[1], (str(node.target), found)


def _lengthen(make: Callable[[], torch.Tensor], shape: Shape) -> torch.Tensor:
    """A constant, padded with zeros at the end of its dims."""
    value = make()
    added = (n - old for n, old in zip(reversed(shape), reversed(value.shape), strict=True))
    return F.pad(value, [n for more in added for n in (0, more)])
