"""`autopar.check_rule`: checks every sharding that a rule allows for one call, and prints it.

There is one line per strategy and mesh (`oracle.check_strategy`). A name whose size no mesh
divides cannot be checked; the report lists it as unchecked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import NotSupportedError, VerificationError
from autopar.operators import UnsupportedFunctionError, function_call
from autopar.oracle.strategies import (
    MESHES,
    OracleCase,
    StrategyErrors,
    check_strategy,
    combinations,
)
from autopar.rules import OpCall, find_operator, has_rule, is_pure, missing_rule, rule_for


@dataclass(frozen=True)
class RuleLine:
    """One row of the report: the errors of a strategy on a mesh, or why it is wrong."""

    strategies: str
    sizes: tuple[int, ...]
    errors: StrategyErrors
    failure: str | None = None

    def __str__(self) -> str:
        head = f"{'x'.join(map(str, self.sizes)):>4}  {self.strategies}"
        if self.failure is not None:
            return f"{head}  WRONG: {self.failure}"
        return f"{head}  value {self.errors.value:.1e}, gradients {self.errors.gradient:.1e}"


@dataclass(frozen=True)
class RuleReport:
    """The result of a check, one line per strategy and mesh.

    unchecked    names that the rule may shard but no mesh here divides, with their sizes
    """

    title: str
    lines: tuple[RuleLine, ...]
    unchecked: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Is the rule right on every strategy and mesh?"""
        return all(line.failure is None for line in self.lines)

    def text(self) -> str:
        verdict = "holds" if self.ok else "is WRONG"
        lines = [f"{self.title} {verdict}", *map(str, self.lines)]
        if self.unchecked:
            lines.append(f"not checked, as no mesh divides them: {', '.join(self.unchecked)}")
        return "\n".join(lines)


def report_case(case: OracleCase, meshes: Sequence[tuple[int, ...]] = MESHES) -> RuleReport:
    """Check all strategies of one call on several meshes."""
    lines, checked = [], set()
    for sizes in meshes:
        for strategies in combinations(case, sizes):
            checked |= {strategy.label for strategy in strategies}
            text = " | ".join(map(str, strategies))
            try:
                lines.append(RuleLine(text, sizes, check_strategy(case, strategies, sizes)))
            except VerificationError as error:
                lines.append(RuleLine(text, sizes, StrategyErrors(), str(error).partition("\n")[0]))
    offered = dict.fromkeys(s.label for s in case.strategies() if s.label)
    unchecked = [_shown(case, label) for label in offered if label not in checked]
    return RuleReport(f"rule of {case.rule.op}", tuple(lines), tuple(unchecked))


def _shown(case: OracleCase, label: str) -> str:
    """A name with its size, `v of 3`; a pair of names is joined by "and"."""
    pattern = case.pattern
    return " and ".join(f"{pattern.names[k]} of {pattern.sizes[k]}" for k in label.split())


def check_rule(op: str | Callable[..., Any], *inputs: Any, **options: Any) -> RuleReport:
    """Check an operator's rule on real inputs: every strategy, on 2, 4 and 2 x 2 ranks.

    op                 the operator, its name, or a `torch.autograd.Function`, as in `register_rule`
    inputs, options    its arguments; floating tensors become float64 and require grad

    With dims of 4 or a multiple of 4, every name can be checked. The report lists the names that
    could not be. Raises `MissingRuleError` for an operator without a rule, and `NotSupportedError`
    for an `autograd.Function` that no operator can stand for.
    """
    args, kwargs = torch.utils._pytree.tree_map(_lifted, (inputs, options))
    if isinstance(op, type) and issubclass(op, torch.autograd.Function):
        overload, args, kwargs = *_as_operator(op, args, kwargs), {}
    else:
        overload = find_operator(op)
    if not has_rule(str(overload)) and is_pure(overload):
        with torch.no_grad():
            result = overload(*args, **kwargs)
        raise missing_rule(str(overload), call=OpCall.of(overload, args, kwargs, result))
    return report_case(OracleCase.of(rule_for(str(overload)), overload, args, kwargs))


def _as_operator(
    cls: type[torch.autograd.Function], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch._ops.OpOverload, tuple[Tensor | None, ...]]:
    """The operator that stands for a call of a function, and its tensors."""
    try:
        call = function_call(cls, args, kwargs)
    except UnsupportedFunctionError as error:
        raise NotSupportedError(str(error), hint=error.hint) from error
    return call.function.op, call.tensors


def _lifted(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_()
    return value
