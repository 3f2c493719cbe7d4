"""What a sharding rule is: one operator's notation, FLOPs, linearity and localisation.

A rule describes one operator alone. `pattern.py` computes the operator's strategies from the
notation and the factors of the actual tensors, in the same way for every rule.
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

    `tensors` are the tensor arguments, with lists of tensors flattened. `inputs` are their shapes,
    `outputs` those of the results. Arguments that are not given have the schema's default.
    """

    op: torch._ops.OpOverload
    args: Mapping[str, Any]
    tensors: tuple[Any, ...]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]

    @staticmethod
    def of_node(node: torch.fx.Node) -> OpCall:
        """The call that an FX node makes; `tensors` are its argument nodes."""
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
        """The call `op(*args, **kwargs)` with its result; `value_of` gives an argument's tensor."""
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
        """Equal for calls that no rule tells apart.

        Such calls differ only in the tensors that they take, of equal shapes, and in the number of
        their random draw (`occurrence`).
        """
        args = ((name, _plain(v)) for name, v in self.args.items() if name != "occurrence")
        return self.op, tuple(args), self.inputs, self.outputs

    def dim(self, name: str = "dim", rank: int | None = None) -> int:
        """A dim argument, as a non-negative index."""
        rank = len(self.inputs[0]) if rank is None else rank
        return int(self.args[name]) % max(rank, 1)


@lru_cache(maxsize=1024)
def _defaults(op: torch._ops.OpOverload) -> Mapping[str, Any]:
    """Argument -> default, by an operator's schema. Cached, because schemas are slow to read."""
    return {a.name: a.default_value for a in op._schema.arguments}


def _plain(value: Any) -> Hashable:
    """An argument in hashable form, with all tensors equal."""
    if isinstance(value, (torch.fx.Node, torch.Tensor)):
        return "tensor"
    if isinstance(value, (list, tuple)):
        return tuple([_plain(v) for v in value])
    if isinstance(value, dict):
        return tuple([(key, _plain(v)) for key, v in value.items()])
    return repr(value)


Family = Callable[[OpCall], Notation]
# (call, local input shapes, local output shapes) -> the arguments that differ on one rank
Localise = Callable[[OpCall, Sequence[Shape], Sequence[Shape]], dict[str, Any]]


@dataclass(frozen=True)
class OpRule:
    """The sharding rule of one operator.

    op         overload name, `aten.mm.default`
    notation   text, or a family: a function of the call, for operators of any rank
    flops      formula over the notation's names; one multiply-add counts as 2. Without a formula,
               an operator costs the bytes that it touches
    linear     sets of inputs that may be Partial together while the others are Replicate; then the
               outputs are Partial. A function of the call if it depends on arguments
    lower      name -> what replaces the operator if that name is sharded; or a pair of names
    paired     names that are sharded only in the pairs of `lower`
    localise   computes one rank's values of arguments that carry sizes
    fused      fused attention, which has rates of its own
    score_bytes  bytes that go to memory and back per score: attention in blocks of rows
    between    formulas, if it is several matmuls: elements that one hands on to another, and
               elements that kernels between them read and write
    saves      it saves more than inputs and outputs, though it has FLOPs; as fused attention does
    view       costs nothing: the output shares the input's memory
    whole_gradients  backward may not be linear in the gradient, so it never gets a Partial one
    check      why a call is not covered, or None; a second line is the hint
    """

    op: str
    notation: str | Family
    flops: str | None = None
    linear: LinearSets | Callable[[OpCall], LinearSets] = ()
    lower: Mapping[str, Lowering] = field(default_factory=dict)
    paired: tuple[str, ...] = ()
    localise: Localise | None = None
    fused: bool = False
    score_bytes: int = 0
    saves: bool = False
    between: tuple[str, ...] = ()
    view: bool = False
    whole_gradients: bool = False
    check: Callable[[OpCall], str | None] | None = None

    def notation_of(self, call: OpCall) -> Notation:
        """The notation of this call, with `...` written out.

        Raises `NotationError` if the tensors of the call do not fit the notation.
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

    @property
    def saves_more(self) -> bool:
        """Is what it saves besides inputs and outputs more than copies of its inputs?"""
        return self.fused or self.saves

    @property
    def uneven_names(self) -> frozenset[str]:
        """The names that count experts: where they are sharded, ranks compute unequal numbers."""
        return frozenset(key.split()[-1] for key, of in self.lower.items() if of.uneven)

    def linear_of(self, call: OpCall) -> LinearSets:
        return self.linear(call) if callable(self.linear) else self.linear

    def flops_of(self, sizes: Mapping[str, float]) -> float:
        """FLOPs by the formula, 0 without one; `sizes` maps the notation's names to local sizes."""
        if self.flops is None:
            return 0.0
        return evaluate(self.flops, sizes) * leading(sizes)

    def between_of(self, sizes: Mapping[str, float]) -> tuple[float, ...]:
        """The values of `between`."""
        return tuple(evaluate(formula, sizes) for formula in self.between)
