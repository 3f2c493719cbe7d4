"""What a sharding rule is: one operator's notation, flops, linearity and localisation.

A rule speaks of one operator alone. `pattern.py` turns its notation and the factors of the
actual tensors into the operator's strategies, the same way for every rule.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.fx

from autopar.errors import NotationError
from autopar.placement import ELLIPSIS, Notation
from autopar.rules.formulas import evaluate, leading
from autopar.rules.lowering import Lowering
from autopar.rules.signature import without_absent

Shape = tuple[int, ...]
LinearSets = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class OpCall:
    """One call of an operator, with its arguments by name and its tensors in order.

    `tensors` are the tensor arguments flattened (lists of tensors included), `inputs` and
    `outputs` their shapes. Arguments that are missing have the schema's default.
    """

    op: torch._ops.OpOverload
    args: Mapping[str, Any]
    tensors: tuple[Any, ...]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]

    @staticmethod
    def of_node(node: torch.fx.Node) -> OpCall:
        """The call an FX node makes; tensors are its argument nodes."""
        assert isinstance(node.target, torch._ops.OpOverload)
        return OpCall.of(
            node.target, node.args, node.kwargs, node.meta["val"], lambda a: a.meta["val"]
        )

    @staticmethod
    def of(
        op: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        value_of: Callable[[Any], Any] = lambda a: a,
    ) -> OpCall:
        defaults = _defaults(op)
        named = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
        tensors = []
        for value in named.values():
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, (torch.fx.Node, torch.Tensor)):
                    tensors.append(item)
        results = result if isinstance(result, (list, tuple)) else (result,)
        return OpCall(
            op,
            named,
            tuple(tensors),
            tuple(tuple(value_of(t).shape) for t in tensors),
            tuple(tuple(r.shape) for r in results if r is not None),
        )

    @cached_property
    def likeness(self) -> Hashable:
        """Equal for calls that differ only in which tensors of these shapes they take, or in which
        draw of random numbers: no rule tells them apart."""
        args = ((name, _plain(v)) for name, v in self.args.items() if name != "occurrence")
        return self.op, tuple(args), self.inputs, self.outputs

    def dim(self, name: str = "dim", rank: int | None = None) -> int:
        """A dim argument, counted from 0."""
        rank = len(self.inputs[0]) if rank is None else rank
        return int(self.args[name]) % max(rank, 1)


@lru_cache(maxsize=1024)
def _defaults(op: torch._ops.OpOverload) -> Mapping[str, Any]:
    """The arguments of an operator's schema, which is slow to say; those by keyword alone last."""
    return {a.name: a.default_value for a in op._schema.arguments}


def _plain(value: Any) -> Hashable:
    """An argument with tensors left out; hashable."""
    if isinstance(value, (torch.fx.Node, torch.Tensor)):
        return "tensor"
    if isinstance(value, (list, tuple)):
        return tuple([_plain(v) for v in value])
    if isinstance(value, dict):
        return tuple([(key, _plain(v)) for key, v in value.items()])
    return repr(value)


Family = Callable[[OpCall], Notation]
# (call, local input shapes, local output shapes) -> arguments that change on one rank
Localise = Callable[[OpCall, Sequence[Shape], Sequence[Shape]], dict[str, Any]]


@dataclass(frozen=True)
class OpRule:
    """The sharding rule of one operator.

    op         overload name, `aten.mm.default`
    notation   text, or a family: a function of the call for operators of any rank
    flops      formula over the notation's names (one multiply-add counts as 2); operators
               without one cost the bytes they touch
    linear     sets of inputs that may be Partial together, the others Replicate; the output
               is then Partial. A function of the call where scalars decide
    lower      name -> what replaces the operator where that name is sharded
    localise   arguments that carry sizes, rewritten for one rank
    fused      a fused attention, which has rates of its own
    view       costs nothing: the output shares the input's memory
    check      why a call is not covered, None if it is; a second line is the hint
    """

    op: str
    notation: str | Family
    flops: str | None = None
    linear: LinearSets | Callable[[OpCall], LinearSets] = ()
    lower: Mapping[str, Lowering] = field(default_factory=dict)
    localise: Localise | None = None
    fused: bool = False
    view: bool = False
    check: Callable[[OpCall], str | None] | None = None

    def notation_of(self, call: OpCall) -> Notation:
        """The notation of this call, with `...` written out.

        Raises `NotationError` when the tensors of the call are not those of the notation.
        """
        if callable(self.notation):
            return self.notation(call)
        parsed = without_absent(self._parsed, call.op, call.args)
        n_leading = [
            len(shape) - (len(term) - 1)
            for term, shape in zip(
                (*parsed.inputs, *parsed.outputs), (*call.inputs, *call.outputs), strict=False
            )
            if ELLIPSIS in term
        ]
        notation = parsed.expanded(n_leading[0] if n_leading else 0)
        for kind, terms, shapes in (
            ("input", notation.inputs, call.inputs),
            ("output", notation.outputs, call.outputs),
        ):
            if [len(term) for term in terms] != [len(shape) for shape in shapes]:
                raise NotationError(
                    f'{self.op}: the {kind}s of "{self.notation}" are not tensors of shapes '
                    f"{', '.join(str(list(shape)) for shape in shapes) or 'none'}",
                    hint="write one term per tensor and one name per dim, `...` for any number",
                )
        return notation

    @cached_property
    def _parsed(self) -> Notation:
        assert isinstance(self.notation, str)
        return Notation.parse(self.notation)

    def linear_of(self, call: OpCall) -> LinearSets:
        return self.linear(call) if callable(self.linear) else self.linear

    def flops_of(self, sizes: Mapping[str, float]) -> float:
        """The formula's value; `sizes` maps the notation's names to local sizes."""
        if self.flops is None:
            return 0.0
        return evaluate(self.flops, sizes) * leading(sizes)
