"""Factor refinement: splits every dim of the graph into the factors that it is a product of.

A contiguous shard cannot express head-wise sharding of a fused QKV projection, whose dim is
3 x heads x head_dim. So each dim is a list of *atoms*, kept in a union-find. If an operator's
notation gives two dims the same name, their atoms become one class. A view that splits a dim splits
its class, and with it every dim of that class. So one pass over the graph reaches the fixpoint.

    unify(a, b)   walk two lists of atoms from the right; atoms of equal size join, and an atom is
                  split by a smaller one that divides it. Where neither divides the other, the
                  lists stay apart, and that operator does not shard the name (`resolve` of
                  `rules/pattern.py`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch.fx

from autopar.identity import Same
from autopar.placement import Notation, TensorType
from autopar.program.graph.program import Program, row_dims
from autopar.rules import OpCall, check_call, rule_for

Shape = tuple[int, ...]
Factored = tuple[tuple[int, ...], ...]  # by dim
Cell = tuple[int, int]  # a dim and one of its factors


@dataclass
class Atom:
    """A class of equal factors; `parts` are the atoms it was split into, outermost first."""

    size: int
    parent: Atom | None = None
    parts: tuple[Atom, ...] = ()

    def root(self) -> Atom:
        root = self
        while root.parent is not None:
            root = root.parent
        # Chains grow with the program's depth, so every atom on this one is linked to the root.
        atom = self
        while atom.parent is not None:
            atom.parent, atom = root, atom.parent
        return root


def leaves(atom: Atom) -> list[Atom]:
    """The unsplit atoms that make up `atom`, outermost first."""
    atom = atom.root()
    return [leaf for part in atom.parts for leaf in leaves(part)] if atom.parts else [atom]


def unify(left: Sequence[Atom], right: Sequence[Atom]) -> None:
    """Join two lists of atoms with equal products, as far as their sizes divide."""
    if len(left) == len(right) == 1:  # the usual case: both dims unsplit
        x, y = left[0].root(), right[0].root()
        if x.size == y.size and not (x.parts or y.parts):
            if x is not y:
                y.parent = x
            return
    a = [leaf for atom in left for leaf in leaves(atom)]
    b = [leaf for atom in right for leaf in leaves(atom)]
    while a and b:
        x, y = a.pop().root(), b.pop().root()
        if x.parts or y.parts:  # was split as an equal atom, earlier in this loop
            a += leaves(x)
            b += leaves(y)
        elif x is y:
            continue
        elif x.size == y.size:
            y.parent = x
        elif x.size % y.size == 0:
            x.parts = (Atom(x.size // y.size), Atom(y.size))
            a += leaves(x)
            b.append(y)
        elif y.size % x.size == 0:
            y.parts = (Atom(y.size // x.size), Atom(x.size))
            b += leaves(y)
            a.append(x)
        else:
            _skip_segment(a, b, x.size, y.size)


def _skip_segment(a: list[Atom], b: list[Atom], x: int, y: int) -> None:
    """Drop trailing atoms of both lists until the products dropped are equal."""
    while x != y and (a if x < y else b):
        if x < y:
            x *= a.pop().root().size
        else:
            y *= b.pop().root().size


def name_sizes(
    notation: Notation, inputs: Sequence[Shape], outputs: Sequence[Shape]
) -> dict[str, int]:
    """The size of every name: written out, or solved from the dims it is in."""
    dims = [
        (dim, shape[i])
        for terms, shapes in ((notation.inputs, inputs), (notation.outputs, outputs))
        for term, shape in zip(terms, shapes, strict=True)
        for i, dim in enumerate(term)
        if dim
    ]
    sizes: dict[str, int] = dict(notation.sizes)
    progress = True
    while progress:
        progress = False
        for dim, size in dims:
            unknown = [name for name in dim if name not in sizes]
            if len(unknown) == 1:
                known = math.prod(sizes[name] for name in dim if name in sizes)
                sizes[unknown[0]] = size // max(known, 1)
                progress = True
    return sizes


# A dim of an operator: position of the tensor, dim, size, and (name, size) of the names that it is
# a product of. Dims and names of size 1 are left out.
_NamedDim = tuple[int, int, int, list[tuple[str, int]]]


def _named_dims(notation: Notation, shapes: Sequence[Shape]) -> list[_NamedDim]:
    """The dims of an operator's tensors, inputs first."""
    n_inputs = len(notation.inputs)
    sizes = name_sizes(notation, shapes[:n_inputs], shapes[n_inputs:])
    found: list[_NamedDim] = []
    terms = (*notation.inputs, *notation.outputs)
    for position, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
        for dim, (names, size) in enumerate(zip(term, shape, strict=True)):
            parts = [(name, sizes[name]) for name in names if sizes.get(name, 1) != 1]
            if size != 1 and parts:
                found.append((position, dim, size, parts))
    return found


@dataclass
class Factors:
    """Atoms of every dim, by value name; None for a dim of size 1."""

    atoms: dict[str, tuple[Atom | None, ...]] = field(default_factory=dict)
    _shapes: dict[str, Shape] = field(default_factory=dict)
    # (notation, shapes) -> its named dims
    _named: dict[Hashable, list[_NamedDim]] = field(default_factory=dict)

    def add(self, name: str, shape: Shape) -> None:
        self.atoms[name] = tuple([Atom(n) if n != 1 else None for n in shape])
        self._shapes[name] = shape

    def join(self, notation: Notation, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Join the dims of one operator's tensors that have the same name."""
        values = (*inputs, *outputs)
        shapes = [self._shapes[name] for name in values]
        key = (Same(notation), *shapes)
        if key not in self._named:
            self._named[key] = _named_dims(notation, shapes)
        atoms = [self.atoms[name] for name in values]
        named: dict[str, Atom] = {}
        for position, dim, size, names in self._named[key]:
            atom = atoms[position][dim]
            assert atom is not None
            ((first, first_size), *others) = names
            if not others and first_size == size and first not in named:
                named[first] = atom
                continue
            for name, of_name in names:
                if name not in named:
                    named[name] = Atom(of_name)
            unify([atom], [named[name] for name, _ in names])

    def sizes(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Factor sizes of each dim of a value."""
        return tuple(
            tuple(leaf.size for leaf in leaves(atom)) if atom else () for atom in self.atoms[name]
        )


def value_names(node: torch.fx.Node) -> tuple[str, ...]:
    """Names of an operator's results: the node's own, or those of its `getitem` users.

    An unused result of a multi-output operator is named `node:index`.
    """
    if not isinstance(node.meta["val"], (tuple, list)):
        return (node.name,)
    out = [f"{node.name}:{i}" for i in range(len(node.meta["val"]))]
    for user in node.users:
        out[int(user.args[1])] = user.name  # type: ignore[arg-type]
    return tuple(out)


@dataclass(frozen=True)
class Operator:
    """An operator of the graph as the passes see it: names of values, call and notation.

    `likeness` numbers the distinct `OpCall.likeness` of one program.
    """

    name: str
    call: OpCall
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    notation: Notation
    likeness: int


def operators_of(program: Program) -> tuple[Operator, ...]:
    """Every operator with its rule's notation; raises `MissingRuleError`."""
    out = []
    known: dict[Hashable, tuple[Notation, int]] = {}
    for node in program.operators:
        call = OpCall.of_node(node)
        found = known.get(call.likeness)
        if found is None:
            rule = rule_for(str(node.target), program.where(node.name), call)
            check_call(rule, call, program.where(node.name))
            found = known[call.likeness] = rule.notation_of(call), len(known)
        inputs = tuple(t.name for t in call.tensors)
        out.append(Operator(node.name, call, inputs, value_names(node), *found))
    return tuple(out)


@dataclass(frozen=True)
class Types:
    """Factor-refined types of every value, and the class of each factor.

    `classes[value][dim][factor]` is an arbitrary number per class. Factors of one class have the
    same size, because operators give them the same name.
    """

    tensors: Mapping[str, TensorType]
    classes: Mapping[str, tuple[tuple[int, ...], ...]]

    def by_cell(self, cells: Mapping[str, Cell]) -> dict[tuple[TensorType, Cell], list[str]]:
        """(type, cell) -> the values that have both; `cells` maps each value to its cell."""
        found: dict[tuple[TensorType, Cell], list[str]] = {}
        for name, cell in cells.items():
            found.setdefault((self.tensors[name], cell), []).append(name)
        return found

    def divide_rows(self, values: Mapping[tuple[TensorType, Cell], Sequence[str]], n: int) -> Types:
        """The types of one of `n` microbatches; `values` are those with a batch factor."""
        tensors = dict(self.tensors)
        for (old, (dim, factor)), names in values.items():
            dims = [list(factors) for factors in old.dims]
            assert dims[dim][factor] % n == 0, (names[0], dims, n)
            dims[dim][factor] //= n
            new = replace(old, dims=tuple(map(tuple, dims)))
            tensors |= dict.fromkeys(names, new)
        return Types(tensors, self.classes)


def tensor_types(
    program: Program,
    operators: Sequence[Operator],
    batch_dims: Mapping[str, int | None] | None = None,
) -> Types:
    """Factor-refined types of every value of the graph; `batch_dims` as in `row_dims`.

    The rows of all inputs are one class, because they are split together: if the model views those
    of one input as (2 4), a rank that has half of them must have half of the others too.
    """
    factors = Factors()
    facts: dict[str, tuple[int, bool, int, int]] = {}

    def add(name: str, value: torch.Tensor, has_grad: bool) -> None:
        factors.add(name, tuple(value.shape))
        facts[name] = (value.element_size(), has_grad, 0, 0)

    for node in program.graph.nodes:
        if node.op == "placeholder":
            add(node.name, node.meta["val"], node.name in program.has_grad)
    for name, info in program.parameters.items():
        if info.reduce_dtype is not None:
            facts[name] = (*facts[name][:2], info.reduce_dtype.itemsize, info.dtype.itemsize)
    dims, _ = row_dims({i.path: i.shape for i in program.inputs.values()}, batch_dims or {})
    rows = [factors.atoms[n][dims[i.path]] for n, i in program.inputs.items() if i.path in dims]
    for one, other in pairwise(atom for atom in rows if atom):
        unify([one], [other])
    for operator in operators:
        value = program.node(operator.name).meta["val"]
        results = value if isinstance(value, (tuple, list)) else (value,)
        for name, result in zip(operator.outputs, results, strict=True):
            add(name, result, name in program.has_grad)
        factors.join(operator.notation, operator.inputs, operator.outputs)
    numbers: dict[int, int] = {}
    # Ids of the roots of a value's dims -> sizes and classes of their factors.
    factored: dict[tuple[int, ...], tuple[Factored, Factored]] = {}
    # One object for all equal types, so that they compare by identity.
    known: dict[Hashable, TensorType] = {}
    types: dict[str, TensorType] = {}
    classes: dict[str, Factored] = {}
    for name, atoms in factors.atoms.items():
        roots = tuple([id(atom.root()) if atom else 0 for atom in atoms])
        if roots not in factored:
            by_dim = [leaves(atom) if atom else [] for atom in atoms]
            factored[roots] = (
                tuple(tuple(leaf.size for leaf in found) for found in by_dim),
                tuple(
                    tuple(numbers.setdefault(id(leaf), len(numbers)) for leaf in found)
                    for found in by_dim
                ),
            )
        sizes, classes[name] = factored[roots]
        fact = (sizes, *facts[name])
        if fact not in known:
            known[fact] = TensorType(*fact)
        types[name] = known[fact]
    return Types(types, classes)
