"""The captured program: one frozen FX graph and what is known about it before planning.

`capture` freezes the graph once, and passes never edit it. They add typed facts (`strategy.py`),
keyed by FX node name. Codegen is the only consumer that writes a program.

The graph holds only placeholders, `call_function` nodes whose target is an `OpOverload`
(or `operator.getitem` after a multi-output operator), and one output node. That returns a tuple:
the loss first if there is one, then `Program.outputs`, then `Program.updates`. Every node but the
output has `meta["val"]` (fake tensor on cpu; a tuple for multi-output operators).
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from autopar.program.graph.audit import Audit
from autopar.program.graph.blocks import block_of
from autopar.program.graph.frozen import Frozen


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter placeholder. `aliases` are its other names if it is tied.

    `dtype` is that of storage. In mixed precision the graph's placeholder has another one, in which
    the parameter is used, and `reduce_dtype` is that of gradients on their way back to storage.
    `mirror_of`: on a stage that uses a parameter of another stage, its name on that stage.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    mirror_of: str | None = None
    reduce_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class BufferInfo:
    """A buffer that steps change. `aliases` are its other names if modules share it.

    `persistent` buffers are part of state dicts. `update` names the value that the buffer holds
    after a forward pass; None if this program does not change it.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    persistent: bool
    update: str | None = None


@dataclass(frozen=True)
class InputInfo:
    """A user-input placeholder. `path` is its key path inside (args, kwargs)."""

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Checkpointed:
    """Operators that the user's code runs inside `torch.utils.checkpoint.checkpoint(...)`.

    `is_selective`: with a policy of which results are kept.
    """

    operators: tuple[str, ...]
    is_selective: bool = False


def flatten_inputs(batch: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    """Path -> leaf of a batch. A path is a keyword's name or a position, dotted if nested.

    `{"ids": t, "mask": [a, b]}` -> `ids`, `mask.0`, `mask.1`; `(x, y)` -> `0`, `1`.
    """
    tree = dict(batch) if isinstance(batch, Mapping) else tuple(batch)
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return {".".join(_key_text(k) for k in path): leaf for path, leaf in leaves}


def row_dims(
    shapes: Mapping[str, tuple[int, ...]], batch_dims: Mapping[str, int | None]
) -> tuple[dict[str, int], int]:
    """Input path -> the dim of its rows; and how many rows the batch has, 0 without a batch.

    `batch_dims` says which dim has the rows (None: no dim); by default it is dim 0. The first input
    with such a dim decides how many rows there are. Inputs of another size in that dim have no
    rows.
    """
    dims: dict[str, int] = {}
    size = 0
    for path, shape in shapes.items():
        dim = batch_dims.get(path, 0 if shape else None)
        if dim is None:
            continue
        size = size or shape[dim]
        if shape[dim] == size and size > 1:
            dims[path] = dim
    return dims, size


def _key_text(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


@dataclass(frozen=True)
class Prologue:
    """Scalars that depend on inputs alone, computed once per step on the whole batch.

    `graph` has one placeholder per used input (named like `Program.inputs`). It returns a tuple
    aligned with `outputs`, the placeholders of the main graph that receive the scalars. The scalars
    are divisors that are sums over rows (a count of labels): the value of a batch is the sum of its
    rows' values.
    """

    graph: torch.fx.GraphModule
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Accumulation:
    """Gradient accumulation: the program is captured on one of `n` microbatches.

    `dims` maps inputs to the dim of their rows; microbatch i takes the i-th of n parts. The losses
    of the microbatches are summed. Inputs are named by path, in a `StageProgram` by placeholder.
    """

    n: int
    dims: Mapping[str, int]

    def rows(self, inputs: Mapping[str, Any], index: int) -> dict[str, Any]:
        """The inputs of microbatch `index`; keys as in `dims`."""
        out = dict(inputs)
        for name, dim in self.dims.items():
            if name in out:
                n_rows = out[name].shape[dim] // self.n
                out[name] = out[name].narrow(dim, index * n_rows, n_rows)
        return out


@dataclass(frozen=True)
class Program:
    """A frozen graph, normalised, with the roles of its placeholders and its outputs.

        parameters   placeholder name -> parameter
        buffers      placeholder name -> buffer that steps change; other buffers are constants
        inputs       placeholder name -> user input; tensors only, other values are baked in
        constants    placeholder name -> function that computes the tensor (shape-only subgraphs:
                     masks, positions); called at run time only, so that planning stays cheap
        prologue     divisors of means over data-dependent counts, or None
        seed         placeholder of the step's seed (`operators/random.py`); None: draws nothing
        loss         node name of the scalar loss, None for a forward-only program
        outputs      node names of all tensors in the model's output, flattened
        out_spec     how `rebuild` makes the model's own output structure
        static_outputs  leaf position in the output structure -> value that is not a tensor
        has_grad     names of nodes whose tensor carries gradient
        keys         node name -> stable key "module.path/op_name#occurrence"
        sources      node name -> "file:line" of the user's code
        valid_sizes  node name of an output -> {dim: the user's size} of dims that end in padding
        modules      names of all modules of the model, also of those that run no operator
        block_lists  paths of the lists of modules whose children are blocks (`blocks.py`)
        accumulation  how the batch splits into microbatches if the loss is not a sum over rows
        checkpointed  regions that the user's code runs again in backward, in order
        audit        what capture made of the user's module
        frozen       Python values that the trace read; they are in the graph
        received     placeholders of values that other stages make, named as on those stages
        sent         names of nodes whose values later stages read

    The program of one stage (`passes/analysis/cutting.py`) is a `Program` too. The captured program
    neither receives nor sends.
    """

    graph: torch.fx.Graph
    parameters: Mapping[str, ParameterInfo]
    buffers: Mapping[str, BufferInfo]
    inputs: Mapping[str, InputInfo]
    constants: Mapping[str, Callable[[], torch.Tensor]]
    prologue: Prologue | None
    loss: str | None
    outputs: tuple[str, ...]
    out_spec: pytree.TreeSpec
    has_grad: frozenset[str]
    keys: Mapping[str, str]
    sources: Mapping[str, str]
    training: bool = True
    model_name: str = "model"
    static_outputs: Mapping[int, Any] = field(default_factory=dict)
    modules: frozenset[str] = frozenset()
    block_lists: frozenset[str] = frozenset()
    received: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    seed: str | None = None
    valid_sizes: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    accumulation: Accumulation | None = None
    checkpointed: tuple[Checkpointed, ...] = field(default=(), compare=False)
    audit: Audit = field(default_factory=Audit, compare=False)
    frozen: Frozen = field(default_factory=Frozen, compare=False)
    _by_name: dict[str, torch.fx.Node] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._by_name.update({n.name: n for n in self.graph.nodes})

    def node(self, name: str) -> torch.fx.Node:
        return self._by_name[name]

    def block(self, operator: str) -> str | None:
        """The block that an operator is of (`blocks.py`)."""
        return block_of(self.keys[operator].rpartition("/")[0], self.block_lists)

    def parameter_block(self, name: str) -> str | None:
        """The block that a parameter is of."""
        return block_of(self.parameters[name].name, self.block_lists)

    @property
    def operators(self) -> Iterator[torch.fx.Node]:
        """The operators in execution order: `call_function` nodes without `getitem`."""
        for node in self.graph.nodes:
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                yield node

    @property
    def updates(self) -> tuple[str, ...]:
        """The new values of changed buffers, in the order of `buffers`."""
        return tuple(b.update for b in self.buffers.values() if b.update is not None)

    def value(self, node: torch.fx.Node) -> Any:
        return node.meta["val"]

    def value_key(self, name: str) -> str:
        """The stable name of a value: the key of its operator, or the name of its placeholder.

        A result of a multi-output operator is `key[index]`.
        """
        node = self.node(name)
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, torch.fx.Node)
            return f"{self.keys[source.name]}[{index}]"
        return self.keys.get(name, name)

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        """The model's own output structure, with `tensors` (aligned with `outputs`) in it."""
        remaining = map(self._without_padding, self.outputs, tensors)
        leaves = [
            self.static_outputs[i] if i in self.static_outputs else next(remaining)
            for i in range(self.out_spec.num_leaves)
        ]
        return pytree.tree_unflatten(leaves, self.out_spec)

    def _without_padding(self, name: str, output: Any) -> Any:
        for dim, size in self.valid_sizes.get(name, {}).items():
            output = output if output is None else output.narrow(dim, 0, size)
        return output

    def where(self, name: str) -> str:
        """Key and source line of a node, for error messages."""
        return f"{self.keys.get(name, name)} ({self.sources.get(name, 'unknown source')})"

    def hash(self) -> str:
        """A hash of operators, wiring, shapes and parameter names; equal across processes."""
        digest = hashlib.sha256()
        for node in self.graph.nodes:
            values = pytree.tree_leaves(node.meta.get("val"))
            shapes = [(tuple(v.shape), str(v.dtype)) for v in values if hasattr(v, "shape")]
            line = (node.op, node.name, str(node.target), str(node.args), str(node.kwargs), shapes)
            digest.update(repr(line).encode())
        digest.update(repr(sorted(p.name for p in self.parameters.values())).encode())
        return digest.hexdigest()[:16]

    def hash_of_constants(self) -> str:
        """A hash of the values of all constants; computes them."""
        digest = hashlib.sha256()
        for name, make in self.constants.items():
            value = make().detach().cpu().contiguous()
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def equals(self, other: Program) -> bool:
        """Does `other` compute the same, with the same constants? Then its code runs this too."""
        if self.hash() != other.hash() or self.constants.keys() != other.constants.keys():
            return False
        if _roles(self) != _roles(other):
            return False
        return all(
            _equal_tensors(make(), other.constants[name]()) for name, make in self.constants.items()
        )


def _roles(program: Program) -> tuple[object, ...]:
    """All that the hash leaves out, but for constants."""
    prologue = program.prologue
    return (
        program.loss, program.outputs, program.out_spec, program.seed, program.training,
        repr(program.static_outputs), program.has_grad, dict(program.inputs),
        dict(program.buffers), dict(program.parameters), program.accumulation,
        prologue and (str(prologue.graph.graph), prologue.outputs),
    )  # fmt: skip


def _equal_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (one.dtype == other.dtype and torch.equal(one, other))
