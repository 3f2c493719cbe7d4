"""Replaces nodes that stand for layers by copies of the operators of the layer that was traced.

The graph is then that of a trace of all layers: the same operators in the same order, with the
lines, modules and marks that each would have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from autopar.capture.trace.checkpointed import REGION, Region, another_region
from autopar.capture.trace.equal_layers import BEGINS, ENDS, STANDS_FOR, Copy, EqualLayers
from autopar.capture.trace.grad_modes import GRAD_ENABLED
from autopar.capture.trace.seeds import SEEDED

aten = torch.ops.aten
_MARKS = ("stack_trace", GRAD_ENABLED, SEEDED)


class UnequalLayersError(Exception):
    """The copies would not be what a trace of all layers gives: trace all of them."""


def write_out(graph: fx.Graph, exported: ExportedProgram, layers: EqualLayers) -> None:
    """Put operators in place of the marks in `graph`, that of `exported` without regions.

    Raises `UnequalLayersError`.
    """
    if layers.n_copies:
        if layers.is_doubtful:
            raise UnequalLayersError("the last layer has effects of its own")
        _Writer(graph, exported, layers).run()
    for node in reversed(graph.nodes):
        if node.target in (BEGINS, ENDS) or (
            node.target is aten.detach.default and not node.users and layers.n_copies
        ):
            graph.erase_node(node)  # as torch.export erases such a `detach`


class _Writer:
    """One walk over the graph.

    bodies    number of an example -> its operators
    begins    number of an example -> its first mark
    results   number of an example -> the nodes of its results
    """

    def __init__(self, graph: fx.Graph, exported: ExportedProgram, layers: EqualLayers) -> None:
        self.graph, self.layers = graph, layers
        nodes = {n.name: n for n in graph.find_nodes(op="placeholder")}
        specs = exported.graph_signature.input_specs
        self.placeholders = {
            str(s.target).removeprefix(layers.prefix): nodes[s.arg.name] for s in specs if s.target
        }
        self.bodies: dict[int, list[fx.Node]] = {}
        self.begins: dict[int, fx.Node] = {}
        self.results: dict[int, list[fx.Node]] = {}
        self.has_writes = any(
            isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable
            for n in graph.nodes
        )

    def run(self) -> None:
        inside: int | None = None
        for node in list(self.graph.nodes):
            if node.target is BEGINS:
                inside = node.args[0] if node.args[0] in self.layers.examples else None
                if inside is not None:
                    self.begins[inside], self.bodies[inside] = node, []
            elif node.target is ENDS:
                self.results[node.args[0]] = node.args[1]
                copy = self.layers.copies.get(node.args[0])
                if copy is not None:
                    self._compare(node.args[0], copy)
                inside = None
            elif node.target is STANDS_FOR:
                self._replace(node)
            elif inside is not None:
                self.bodies[inside].append(node)

    def _replace(self, node: fx.Node) -> None:
        copy = self.layers.copies[node.args[0]]  # type: ignore[index]
        env, meta = self._operands(node, copy), self._meta(node, copy)
        results = [(self.results[copy.example][read.args[1]], read) for read in node.users]  # type: ignore[index]
        values = _Values([*env.items(), *results]) if self.has_writes else None
        with self.graph.inserting_before(node):
            for own in self.bodies[copy.example]:
                made = self.graph.node_copy(own, lambda n: _look_up(env, n))
                made.meta = meta(own)
                if values is not None:
                    made.meta["val"] = pytree.tree_map_only(torch.Tensor, values, own.meta["val"])
                env[own] = made
        for own, read in results:
            read.replace_all_uses_with(env[own])
            self.graph.erase_node(read)
        self.graph.erase_node(node)

    def _operands(self, node: fx.Node, copy: Copy) -> dict[fx.Node, fx.Node]:
        """What the example was given, and what is in its place."""
        example = self.layers.examples[copy.example].layer
        pairs = [*zip(self.begins[copy.example].args[1], node.args[1], strict=True)]  # type: ignore[arg-type]
        names = zip(example.tensors, copy.layer.tensors, strict=True)
        env = {self.placeholders[one]: self.placeholders[other] for one, other in names}
        env |= {n: n for name in example.shared if (n := self.placeholders.get(name))}
        if any(env.get(one, other) is not other for one, other in pairs):
            raise UnequalLayersError("an argument of a layer is its own parameter")
        return env | dict(pairs)

    def _meta(self, node: fx.Node, copy: Copy) -> Callable[[fx.Node], dict[str, Any]]:
        """The metadata of the copy of an operator."""
        begins = self.begins[copy.example]
        if node.meta.get("stack_trace") != begins.meta.get("stack_trace"):
            raise UnequalLayersError("layers are called from several lines")
        old = self.layers.prefix + self.layers.examples[copy.example].layer.path
        new = self.layers.prefix + copy.layer.path
        outer, around = begins.meta.get(REGION), node.meta.get(REGION)
        if outer is not None and around is None:
            raise UnequalLayersError("only the layer that was traced is checkpointed")
        regions: dict[Region, Region] = {}
        stacks: dict[tuple[str, ...], dict[str, Any]] = {}

        def metadata(own: fx.Node) -> dict[str, Any]:
            meta = dict(own.meta)
            stack = meta.get("nn_module_stack")
            if stack:
                key = tuple(stack)
                if key not in stacks:
                    stacks[key] = dict(_stack_of_copy(stack, old, new))
                meta["nn_module_stack"] = stacks[key]
            region = meta.pop(REGION, None)
            if around is not None:  # the outermost counts
                meta[REGION] = around
            elif region is not None:
                if region not in regions:
                    regions[region] = another_region(region)
                meta[REGION] = regions[region]
            return meta

        return metadata

    def _compare(self, number: int, copy: Copy) -> None:
        """Is a layer that was traced what its copy would be?"""
        begins, body, example = self.begins[number], self.bodies[number], self.bodies[copy.example]
        env, meta = self._operands(begins, copy), self._meta(begins, copy)
        regions: dict[Region | None, Region | None] = {None: None}
        for own, traced in itertools.zip_longest(example, body):
            if own is None or traced is None or own.target is not traced.target:
                raise UnequalLayersError("the last layer has other operators")
            args = fx.node.map_arg((own.args, own.kwargs), lambda n: _look_up(env, n))
            expected, found = meta(own), traced.meta
            if args != (traced.args, traced.kwargs) or _known(expected) != _known(found):
                raise UnequalLayersError("the last layer has other operands")
            region = regions.setdefault(expected.get(REGION), found.get(REGION))
            if region is not found.get(REGION):
                raise UnequalLayersError("the last layer has other checkpointed parts")
            env[own] = traced
        pairs = zip(self.results[copy.example], self.results[number], strict=True)
        if any(_look_up(env, one) is not other for one, other in pairs):
            raise UnequalLayersError("the last layer has other results")


class _Values:
    """Fake tensors of a copy, which share memory as those of the example do: what an operator
    writes in place is known by that. `pairs` are values of both that the trace has."""

    def __init__(self, pairs: Iterable[tuple[fx.Node, fx.Node]]) -> None:
        self._bases = {
            _memory(one.meta["val"]): other.meta["val"]
            for one, other in pairs
            if isinstance(one.meta["val"], torch.Tensor)
        }

    def __call__(self, like: torch.Tensor) -> torch.Tensor:
        """The tensor in place of that of the example."""
        assert isinstance(like, FakeTensor)
        sizes = tuple(like.shape), like.stride()
        base = self._bases.get(_memory(like))
        if like.storage_offset() if base is None else base.dtype != like.dtype:
            raise UnequalLayersError("a view whose memory is not known")
        with like.fake_mode, torch.no_grad():
            if base is not None:
                return base.as_strided(*sizes, like.storage_offset())
            made = torch.empty_strided(*sizes, dtype=like.dtype, device=like.device)
        self._bases[_memory(like)] = made
        return made


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _look_up(env: Mapping[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    if node not in env:
        raise UnequalLayersError(f"a layer reads `{node}`, which it was not given")
    return env[node]


def _stack_of_copy(stack: Mapping[str, Any], old: str, new: str) -> Iterator[tuple[str, Any]]:
    """The modules of an operator, those of layer `old` as of layer `new`."""
    for key, (path, kind) in stack.items():
        is_within = path == old or path.startswith(f"{old}.")
        yield (
            (key.replace(path, new + path.removeprefix(old)), (new + path.removeprefix(old), kind))
            if is_within
            else (key, (path, kind))
        )


def _known(meta: Mapping[str, Any]) -> tuple[object, ...]:
    """What later steps read of a node."""
    values = [
        (tuple(v.shape), v.stride(), v.dtype, v.requires_grad)
        if isinstance(v, torch.Tensor)
        else repr(v)
        for v in pytree.tree_leaves(meta.get("val"))
    ]
    stack = meta.get("nn_module_stack") or {}
    return values, [meta.get(key) for key in _MARKS], [*stack.items()]
