"""`autopar ops`: which operators of a model have a sharding rule.

An operator is *covered* when it has a rule that takes all its calls, *missing* when it has
none, *refused* when its rule does not take the arguments of a call (cross-entropy of
class probabilities).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from autopar.cli.shell import Result

if TYPE_CHECKING:
    from autopar.program import Program

Status = Literal["covered", "missing", "refused"]
SHOWN_SOURCES = 3


@dataclass(frozen=True)
class OperatorUse:
    """One operator: how often a model calls it, and the lines that do."""

    op: str
    status: Status
    count: int
    sources: tuple[str, ...]
    reason: str = ""


def operator_uses(program: Program) -> list[OperatorUse]:
    """Every operator of a captured program: the uncovered ones first, then by count."""
    from autopar.rules import OpCall, has_rule, rule_for

    counts: dict[str, int] = {}
    sources: dict[str, dict[str, None]] = {}
    reasons: dict[str, str] = {}
    for node in program.operators:
        op = str(node.target)
        counts[op] = counts.get(op, 0) + 1
        sources.setdefault(op, {}).setdefault(program.sources.get(node.name, "unknown source"))
        check = rule_for(op).check if has_rule(op) else None
        reason = check(OpCall.of_node(node)) if check else None
        if reason is not None:
            reasons.setdefault(op, reason.replace("\n", ": "))

    def status(op: str) -> Status:
        if not has_rule(op):
            return "missing"
        return "refused" if op in reasons else "covered"

    uses = [
        OperatorUse(op, status(op), count, tuple(sources[op]), reasons.get(op, ""))
        for op, count in counts.items()
    ]
    return sorted(uses, key=lambda use: (use.status == "covered", -use.count, use.op))


def ops_result(uses: Sequence[OperatorUse]) -> Result:
    """A table, the lines of what is not covered, and what to do."""
    bad = [use for use in uses if use.status != "covered"]
    width = max((len(use.op) for use in uses), default=8)
    lines = [f"{'operator':{width}}  calls  rule"]
    for use in uses:
        lines.append(f"{use.op:{width}}  {use.count:5}  {use.status}")
    for use in bad:
        more = len(use.sources) - SHOWN_SOURCES
        shown = [*use.sources[:SHOWN_SOURCES], *([f"... {more} more lines"] if more > 0 else [])]
        lines += ["", f"{use.op}: {use.reason or 'no rule'}", *(f"  at {line}" for line in shown)]
    verdict = f"{len(uses)} operators, {sum(use.count for use in uses)} calls: "
    if bad:
        verdict += f"{len(bad)} not covered; see autopar.register_rule"
    else:
        verdict += "all covered"
    data = {"operators": [asdict(use) for use in uses], "missing": [use.op for use in bad]}
    return Result("\n".join([*lines, "", verdict]), data, ok=not bad)
