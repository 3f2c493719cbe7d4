"""Attention masks that no input reaches, and that a flag or nothing at all can replace.

Fused kernels skip what `is_causal` hides, and a mask keeps flash attention from running. Models
that build their masks themselves give every attention an explicit one when they are traced. Such a
mask is evaluated here, on the CPU, and goes if it is exactly one of these:

    causal     the lower triangle, square, first row aligned with the first key: `is_causal`
    full       nothing is hidden: no mask

    boolean    True is seen, False is hidden
    floating   0 is seen, -inf or a dtype's lowest number is hidden

Sliding windows, padding and biases differ somewhere, and stay.

A mask has as many bytes as the scores of an unfused attention, so it never exists as a whole:

    mask = elementwise(parts)        a part has a dim of rows, of columns, or neither: small

Parts are computed once, and the mask from them: where its rows change, if they do so at few columns
(`piecewise.py`); else in blocks of rows, until one is neither.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.capture.attention.piecewise import PiecewiseMask, compute_step
from autopar.capture.builder import TracedCall
from autopar.capture.dependence import Depends, subgraph
from autopar.capture.findings import Findings
from autopar.capture.names import source_line
from autopar.errors import CaptureError
from autopar.operators import ATTENTION_DROPOUT

aten = torch.ops.aten
ATTENTION = frozenset({aten.scaled_dot_product_attention.default, ATTENTION_DROPOUT})
# Elementwise, but not tagged so.
_ALSO_ELEMENTWISE = frozenset(
    {aten.where.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf, aten.to.dtype,
     aten._to_copy.default}
)  # fmt: skip
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HIDDEN = torch.tensor([-torch.inf, *(torch.finfo(d).min for d in _DTYPES)], dtype=torch.float64)
# A mask of 65,536 tokens takes about as many seconds as it has elementwise operators.
_MAX_ELEMENTS = 1 << 32
_MAX_PART_BYTES = 1 << 28
_BLOCK_ELEMENTS = 1 << 20  # half a cache


def replace_masks(
    graph: fx.Graph,
    depends: Mapping[fx.Node, Depends],
    leaves: Mapping[fx.Node, Callable[[], Tensor]],
    findings: Findings,
) -> frozenset[fx.Node]:
    """Replace such masks in `graph`; returns the leaves that they were computed from.

    leaves    placeholders of constants -> their values
    """
    users: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        mask = mask_of(node)
        if mask is not None and depends[mask] is Depends.CONSTANT:
            users.setdefault(mask, []).append(node)
    read: set[fx.Node] = set()
    for mask, attentions in users.items():
        try:
            found = _Mask(mask).looked_at(leaves)
        except _TooLargeError:
            rows, columns = mask.meta["val"].shape[-2:]
            findings.add(
                "kept", f"an attention mask of {rows} x {columns}", "too large to be looked at",
                source_line(mask),
            )  # fmt: skip
            continue
        if found is None:
            continue
        kind, its_leaves = found
        for node in attentions:
            TracedCall.of(node).change(attn_mask=None, is_causal=kind == "causal")
        read |= its_leaves
        made_of = "`is_causal`" if kind == "causal" else "no mask: it hides nothing"
        findings.add("replaced", f"a {kind} mask", made_of, source_line(mask), routine=True)
    return frozenset(read)


def mask_of(node: fx.Node) -> fx.Node | None:
    """The mask of an attention, if it has dims of queries and keys."""
    if node.target not in ATTENTION:
        return None
    bound = TracedCall.of(node).bind()
    key, mask = bound["key"], bound["attn_mask"]
    if mask is None:
        return None
    shape, n_keys = mask.meta["val"].shape, key.meta["val"].shape[-2]
    return mask if len(shape) >= 2 and shape[-1] == n_keys else None


def evaluate(
    nodes: Sequence[fx.Node], leaves: Mapping[fx.Node, Callable[[], Tensor]]
) -> list[Tensor]:
    """The values of constants. Raises `CaptureError` for a leaf without a value."""
    graph, inputs = subgraph([*nodes])
    by_name = {leaf.name: read for leaf, read in leaves.items()}
    values = [by_name[n.name]().to(n.meta["val"].dtype) for n in inputs]
    with torch.no_grad():
        return list(fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(*values))


class _TooLargeError(Exception):
    """A mask has too many elements to look at each."""


class _Mask:
    """Looks at one mask.

    parts    the nodes that it is computed from elementwise
    steps    the elementwise nodes, in order
    """

    def __init__(self, mask: fx.Node) -> None:
        self.mask = mask
        self.n_rows, self.n_columns = mask.meta["val"].shape[-2:]
        self.parts: dict[fx.Node, None] = {}
        self.steps: list[fx.Node] = []
        self._walk(mask, set())

    def looked_at(
        self, leaves: Mapping[fx.Node, Callable[[], Tensor]]
    ) -> tuple[str, frozenset[fx.Node]] | None:
        """("causal" or "full", leaves that were read); None if it is neither, or not known.

        Raises `_TooLargeError`.
        """
        graph, inputs = subgraph([*self.parts])
        stored = (n.meta["val"].untyped_storage().nbytes() for n in graph.nodes if n.op != "output")
        if any(n_bytes > _MAX_PART_BYTES for n_bytes in stored):
            return None
        try:
            found = evaluate([*self.parts], leaves)
        except CaptureError:  # a buffer without values: raised when its values are needed
            return None
        with torch.no_grad():
            parts = {node: _once(v) for node, v in zip(self.parts, found, strict=True)}
            kind = self._kind(parts)
        read = {node.name for node in inputs}
        return None if kind is None else (kind, frozenset(x for x in leaves if x.name in read))

    def _walk(self, node: fx.Node, seen: set[fx.Node]) -> None:
        if node in seen:
            return
        seen.add(node)
        if node.op != "call_function" or not is_elementwise(node.target):
            self.parts[node] = None
            return
        for source in node.all_input_nodes:
            self._walk(source, seen)
        self.steps.append(node)

    def _kind(self, parts: Mapping[fx.Node, Tensor]) -> str | None:
        """What every block of rows is."""
        kinds = {"full", "causal"} if self.n_rows == self.n_columns > 1 else {"full"}
        piecewise = PiecewiseMask.of(self.mask, self.steps, parts)
        if piecewise is not None:
            rows = torch.arange(self.n_rows).unsqueeze(1)
            near, block = piecewise.evaluate(torch.cat((rows, rows + 1), dim=1))
            return next(iter(_possible_kinds(block, rows >= near, kinds)), None)
        if self.n_rows * self.n_columns > _MAX_ELEMENTS:
            raise _TooLargeError
        n_rows = max(1, _BLOCK_ELEMENTS // self.n_columns)
        columns = torch.arange(self.n_columns)
        for start in range(0, self.n_rows, n_rows):
            block = self._block(parts, start, min(n_rows, self.n_rows - start))
            rows = torch.arange(start, start + block.shape[-2])
            kinds = _possible_kinds(block, rows.unsqueeze(1) >= columns, kinds)
            if not kinds:
                return None
        return kinds.pop()

    def _block(self, parts: Mapping[fx.Node, Tensor], start: int, n_rows: int) -> Tensor:
        """Rows [start, start + n_rows) of the mask; leading dims may have size 1."""
        values = {
            node: part.narrow(-2, start, n_rows)
            if part.dim() >= 2 and part.shape[-2] == self.n_rows > 1
            else part
            for node, part in parts.items()
        }
        for node in self.steps:
            values[node] = compute_step(node, values)
        return values[self.mask]


def is_elementwise(target: Any) -> bool:
    """Is each element computed from those at its place? `expand` counts."""
    if target in _ALSO_ELEMENTWISE or target is aten.expand.default:
        return True
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def _once(value: Tensor) -> Tensor:
    """The value with size 1 in leading dims along which it repeats."""
    for dim in range(value.dim() - 2):
        first = value.narrow(dim, 0, 1)
        if value.shape[dim] > 1 and (value.stride(dim) == 0 or bool((value == first).all())):
            value = first
    return value


def _possible_kinds(block: Tensor, causal: Tensor, kinds: Collection[str]) -> set[str]:
    """The kinds that a block of a mask may be of; `causal` is what a causal one shows."""
    seen = {"full": torch.tensor(True), "causal": causal}
    return {kind for kind in kinds if _shows(block, seen[kind])}


def _shows(block: Tensor, seen: Tensor) -> bool:
    """Does a block of a mask show what is `seen`, and hide the rest?"""
    if block.dtype == torch.bool:
        return bool((block == seen).all())
    if not block.dtype.is_floating_point:
        return False
    return bool(torch.where(seen, block == 0, torch.isin(block.double(), _HIDDEN)).all())
