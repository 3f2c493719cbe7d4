"""The registry: finds the rule of an operator by its overload name, and adds rules of users."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from string import ascii_lowercase
from typing import Any

import torch

from autopar.errors import MissingRuleError, NotSupportedError, OptionError
from autopar.operators import function_of
from autopar.placement import Notation, Term
from autopar.rules.derived import derived_rule, is_pure
from autopar.rules.families import whole
from autopar.rules.functions import function_rule, is_function, register_function
from autopar.rules.operators import find_operator, lookup
from autopar.rules.rule import Localise, OpCall, OpRule, Shape
from autopar.rules.signature import check_flops, check_notation, check_operator
from autopar.rules.tables import RULES

_registry: dict[str, OpRule] = {rule.op: rule for rule in RULES}
_kept_whole: dict[str, OpRule] = {}
assert len(_registry) == len(RULES), "an operator has two rules"


def all_rules() -> Iterator[OpRule]:
    return iter(_registry.values())


def has_rule(op: str) -> bool:
    return own_rule(op) is not None or derived_rule(op) is not None


# Operators without a rule -> what users call them, and what to write.
_OTHERWISE = {
    "torch_attn._varlen_attn.default": (
        "torch.nn.attention.varlen.varlen_attn (documents of all rows in one dim)",
        "keep rows of the batch apart, [rows, heads, tokens, features], and call "
        "scaled_dot_product_attention or flex_attention under a mask that compares the numbers of "
        "documents: of 65,536 tokens or more it becomes a range of keys for each row, and "
        'lengths= prices it. fallback="replicate" keeps varlen_attn whole on every rank',
    ),
}


def own_rule(op: str) -> OpRule | None:
    """The rule written for an overload, in the tables or by `register_rule`."""
    return _registry.get(op) or function_rule(op)


def rule_for(op: str, where: str = "", call: OpCall | None = None) -> OpRule:
    """The rule of an overload; raises `MissingRuleError`, whose hint is a line for `call`.

    An `autograd.Function` without a rule is kept whole.
    """
    rule = own_rule(op) or derived_rule(op) or _kept_whole.get(op)
    if rule is None and is_function(op):
        return OpRule(op, whole, whole_gradients=True)
    if rule is None:
        raise missing_rule(op, where, call)
    return rule


def missing_rule(op: str, where: str = "", call: OpCall | None = None) -> MissingRuleError:
    """The error for an operator without a rule, with a line that gives `call` one."""
    if op in _OTHERWISE:
        described, hint = _OTHERWISE[op]
        return MissingRuleError(f"{described} has no sharding rule", where=where, hint=hint)
    function = function_of(op)
    described = f"operator {op}"
    if function is not None:
        described = f"autograd.Function {function.cls.__qualname__}"
    found = lookup(op)
    try:
        if found is not None:
            check_operator(found)
        means = "keeps it whole; drop the ! of a name that may be sharded"
        hint = f"{register_line(op, call)} {means if call else 'with one term for each tensor'}"
    except NotSupportedError as error:
        hint = error.hint or ""
    return MissingRuleError(f"{described} has no sharding rule", where=where, hint=hint)


def register_line(op: str, call: OpCall | None) -> str:
    """A call of `register_rule` that fits `call`, with all names frozen."""
    function = function_of(op)
    public = op.removesuffix(".default").replace(".", "::", 1)
    name = f'"{public}"' if function is None else function.cls.__qualname__
    return f"autopar.register_rule({name}, {_frozen_notation(call) if call else 'notation'})"


def _frozen_notation(call: OpCall) -> str:
    """`"a! b!, a c! -> a c"`: dims of equal size at the same place of two tensors have one name."""
    known: dict[tuple[int, int], str] = {}
    letters = (f"{letter}{n or ''}" for n in itertools.count() for letter in ascii_lowercase)

    def name(place: tuple[int, int]) -> str:
        if place not in known:
            known[place] = next(letters)
        return known[place]

    def term(shape: Shape) -> Term:
        return tuple(() if place[1] == 1 else (name(place),) for place in enumerate(shape))

    inputs, outputs = (tuple(map(term, shapes)) for shapes in (call.inputs, call.outputs))
    return f'"{Notation(inputs, outputs, frozenset(known.values()))}"'


def keep_whole(op: str, where: str = "") -> None:
    """Give an operator without a rule one that never shards it.

    Raises `MissingRuleError` for an operator that writes to its arguments or draws random numbers:
    running it on every rank would give other results.
    """
    if not is_pure(find_operator(op)):
        raise missing_rule(op, where)
    _kept_whole[op] = OpRule(op, whole)


def check_call(rule: OpRule, call: OpCall, where: str = "") -> None:
    """Raises `NotSupportedError` for a call whose arguments the rule does not cover."""
    reason = rule.check(call) if rule.check else None
    if reason is not None:
        what, _, hint = reason.partition("\n")
        raise NotSupportedError(what, where=where, hint=hint or "change the model or the loss")


def register_rule(
    op: str | Callable[..., Any],
    notation: str,
    *,
    flops: str | None = None,
    lower: Localise | None = None,
) -> OpRule:
    """Add the rule of an operator: how it may be sharded.

    op         `"namespace::name"` (or `"namespace::name.overload"`), the operator itself, or a
               subclass of `torch.autograd.Function`: the rule then holds for all its calls,
               whatever their other arguments are
    notation   its tensor arguments and results, `"b s h, h f -> b s f"`; in calls without an
               optional tensor, its term is dropped
    flops      a formula over the notation's names, `"2*b*s*h*f"`; without one, the operator costs
               the bytes that it touches
    lower      `(call, local_inputs, local_outputs) -> {argument: value}`, for arguments that carry
               sizes

    A second rule of an operator replaces the first. All plans made afterwards use it, also those of
    models that are already captured.

    Raises `NotationError` for a notation that is malformed or does not fit the operator's tensors,
    `OptionError` for an operator that does not exist, for flops over other names, or for `lower` of
    an `autograd.Function`, and
    `NotSupportedError` for an operator that writes to its arguments or draws random numbers.
    """
    parsed = Notation.parse(notation)
    if isinstance(op, type) and issubclass(op, torch.autograd.Function):
        if lower is not None:
            raise OptionError(
                f"lower= cannot change arguments of {op.__qualname__}: they are fixed when it is "
                "traced",
                hint="let forward read sizes from the shapes of its tensors",
            )
        return register_function(op, notation, flops)
    overload = find_operator(op)
    check_operator(overload)
    check_notation(parsed, overload)
    if flops is not None:
        check_flops(flops, parsed, overload)
    rule = OpRule(str(overload), notation, flops=flops, localise=lower)
    _registry[rule.op] = rule
    return rule
