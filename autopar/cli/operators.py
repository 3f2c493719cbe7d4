"""`autopar ops`: which operators of a model have a sharding rule, and what cannot be sharded.

    covered      a rule accepts all its calls: its own, or one derived from torch's tag of
                 pointwise operators
    replicated   no rule; every rank runs it whole (`--fallback replicate`)
    missing      no rule
    refused      its rule rejects the arguments of a call (a sparse embedding)

Some rules replace an operator by a function that communicates when certain names of its notation
are sharded. With a mesh, `uneven_dims` lists the dims of parameters that cannot be sharded over all
ranks. A dim can be if the ranks divide one of its factors, or if two factors on two axes together
take all ranks. A vocabulary may be padded instead (`passes/analysis/padding.py`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal

from autopar.cli.shell import Result

if TYPE_CHECKING:
    from autopar.program.graph import Audit, Program
    from autopar.rules import OpCall

Status = Literal["covered", "replicated", "missing", "refused"]
BAD = ("missing", "refused")
SHOWN_SOURCES = 3


@dataclass(frozen=True)
class Replacement:
    """A function that replaces an operator when `names` of its notation are sharded."""

    names: str
    notation: str
    function: str
    collectives: tuple[str, ...]

    def __str__(self) -> str:
        inner = ", ".join(self.collectives) or "no collective inside"
        return f'{self.names} of "{self.notation}": {self.function} ({inner})'


@dataclass(frozen=True)
class OperatorUse:
    """One operator: how often a model calls it, the lines that do, what replaces it.

    `rule` is "own", "derived", or "" if there is none.
    """

    op: str
    status: Status
    rule: str
    count: int
    sources: tuple[str, ...]
    reason: str = ""
    replaced: tuple[Replacement, ...] = ()


@dataclass(frozen=True)
class UnevenDim:
    """A dim of a parameter that cannot be sharded over all ranks; `padded_to` None: not padded.

    `factors` are the sizes whose product the dim is. `most_ranks` is the largest number of ranks
    that can share the dim.
    """

    parameter: str
    dim: int
    size: int
    factors: tuple[int, ...]
    most_ranks: int
    padded_to: int | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.padded_to is not None:
            return f"padded to {self.padded_to}"
        at_most = f", shared by {self.most_ranks}" if self.most_ranks > 1 else ", whole"
        return f"{self.reason}{at_most}"


def operator_uses(program: Program, fallback: str = "error") -> list[OperatorUse]:
    """Every operator of a captured program: the uncovered ones first, then by count."""
    from autopar.rules import OpCall

    calls: dict[str, list[OpCall]] = {}
    sources: dict[str, dict[str, None]] = {}
    for node in program.operators:
        op = str(node.target)
        calls.setdefault(op, []).append(OpCall.of_node(node))
        sources.setdefault(op, {}).setdefault(program.sources.get(node.name, "unknown source"))
    uses = [_use(op, found, tuple(sources[op]), fallback) for op, found in calls.items()]
    return sorted(uses, key=lambda use: (use.status == "covered", -use.count, use.op))


def _use(op: str, calls: Sequence[OpCall], sources: tuple[str, ...], fallback: str) -> OperatorUse:
    from autopar.rules import has_rule, is_function, is_pure, own_rule, rule_for

    if not has_rule(op):
        keeps = is_function(op) or (fallback == "replicate" and is_pure(calls[0].op))
        status: Status = "replicated" if keeps else "missing"
        return OperatorUse(op, status, "", len(calls), sources)
    kind = "own" if own_rule(op) else "derived"
    covered = OperatorUse(op, "covered", kind, len(calls), sources)
    check = rule_for(op).check
    reasons = [reason for call in calls if check and (reason := check(call)) is not None]
    if reasons:
        return replace(covered, status="refused", reason=reasons[0].replace("\n", ": "))
    return replace(covered, replaced=_replacements(calls))


def _replacements(calls: Sequence[OpCall]) -> tuple[Replacement, ...]:
    """The functions that replace an operator when a name is sharded; each function once."""
    from autopar.rules import rule_for

    rule = rule_for(str(calls[0].op))
    found: dict[str, Replacement] = {}
    for notation in map(rule.notation_of, calls if rule.lower else ()):
        free = set(notation.names) - notation.frozen
        for names, lowering in rule.lower.items():
            if set(names.split()) <= free:
                inner = tuple(f"{n} {' '.join(key)}" for key, n in lowering.n_calls.items())
                made = Replacement(names, str(notation), lowering.function, inner)
                found.setdefault(lowering.function, made)
    return tuple(found.values())


def uneven_dims(program: Program, n_ranks: int, kept_whole: Sequence[str] = ()) -> list[UnevenDim]:
    """The dims of parameters that cannot be sharded over `n_ranks`, and why.

    Dims with fewer elements than ranks are left out, except for vocabularies. Every operator must
    have a rule or be in `kept_whole`.
    """
    from autopar.passes.analysis import find_paddings, keep_whole_as_planned
    from autopar.program.graph import operators_of, tensor_types

    keep_whole_as_planned(kept_whole)
    paddings = find_paddings(program, n_ranks)
    types = tensor_types(program, operators_of(program)).tensors
    found = []
    for value, info in program.parameters.items():
        padded = paddings.shapes.get(info.name, info.shape)
        refused = paddings.refused.get(info.name, "")
        for dim, (size, factors) in enumerate(zip(info.shape, types[value].dims, strict=True)):
            if _share(factors, n_ranks):
                continue
            most = max(n for n in _divisors(n_ranks) if _share(factors, n))
            row = UnevenDim(info.name, dim, size, factors, most)
            if padded[dim] != size:
                found.append(replace(row, padded_to=padded[dim]))
            elif refused.startswith(f"dim {dim} "):
                found.append(replace(row, reason=refused.partition(": ")[2]))
            elif size >= n_ranks:
                found.append(replace(row, reason=_indivisible(size, factors, n_ranks)))
    return found


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _share(factors: Sequence[int], n_ranks: int) -> bool:
    """Can `n_ranks` share a dim: by one factor on one axis, or by two factors on two axes?"""
    if n_ranks == 1 or any(factor % n_ranks == 0 for factor in factors):
        return True
    return any(
        one % n == 0 and other % (n_ranks // n) == 0
        for n in _divisors(n_ranks)
        for one, other in itertools.permutations(factors, 2)
    )


def _indivisible(size: int, factors: Sequence[int], n_ranks: int) -> str:
    if size % n_ranks:
        return f"{n_ranks} ranks do not divide {size}"
    return f"{n_ranks} ranks divide no factor of {' x '.join(map(str, factors))}"


def ops_result(
    uses: Sequence[OperatorUse],
    dims: Sequence[UnevenDim] | None = None,
    n_ranks: int = 0,
    audit: Audit | None = None,
) -> Result:
    """The operators, the lines of those not covered, the replacements, uneven dims and a verdict.

    `audit` is what capture made of the model; all its findings are listed.

    `dims` is None if no mesh was given, or if parameters could not be examined.
    """
    bad = [use for use in uses if use.status in BAD]
    text = "\n\n".join(
        "\n".join(block)
        for block in (
            _table(uses),
            *map(_where, bad),
            _lowered(uses),
            _uneven(dims, n_ranks, bad),
            audit.text(full=True).splitlines() if audit else [],
        )
        if block
    )
    verdict = f"{len(uses)} operators, {sum(use.count for use in uses)} calls: "
    if bad:
        verdict += f"{len(bad)} not covered; see autopar.register_rule"
    else:
        kept = sum(use.status == "replicated" for use in uses)
        verdict += f"{len(uses) - kept} covered, {kept} replicated" if kept else "all covered"
    data = {
        "operators": [asdict(use) for use in uses],
        "missing": [use.op for use in bad],
        "replicated": [use.op for use in uses if use.status == "replicated"],
        "uneven_dims": None if dims is None else [asdict(dim) for dim in dims],
        "captured": None if audit is None else asdict(audit),
    }
    return Result(f"{text}\n\n{verdict}", data, ok=not bad)


def _table(uses: Sequence[OperatorUse]) -> list[str]:
    width = max((len(use.op) for use in uses), default=8)
    lines = [f"{'operator':{width}}  calls  rule"]
    for use in uses:
        shown = use.rule if use.status == "covered" else use.status
        lines.append(f"{use.op:{width}}  {use.count:5}  {shown}")
    return lines


def _where(use: OperatorUse) -> list[str]:
    more = len(use.sources) - SHOWN_SOURCES
    shown = [*use.sources[:SHOWN_SOURCES], *([f"... {more} more lines"] if more > 0 else [])]
    return [f"{use.op}: {use.reason or 'no rule'}", *(f"  at {line}" for line in shown)]


def _lowered(uses: Sequence[OperatorUse]) -> list[str]:
    lines = []
    for use in uses:
        if use.replaced:
            lines += [f"  {use.op}", *(f"    {replacement}" for replacement in use.replaced)]
    return ["replaced by a function that communicates, when sharded", *lines] if lines else []


def _uneven(
    dims: Sequence[UnevenDim] | None, n_ranks: int, bad: Sequence[OperatorUse]
) -> list[str]:
    if not n_ranks:
        return []
    if dims is None:
        return [f"parameters on {n_ranks} ranks: not examined, {len(bad)} operators lack a rule"]
    if not dims:
        return [f"all {n_ranks} ranks can share every parameter dim of at least that size"]
    rows = Counter((_pattern(d.parameter), d.dim, d.size, str(d)) for d in dims)
    width = max(len(name) for name, *_ in rows)
    lines = [f"parameter dims that {n_ranks} ranks cannot share as they are"]
    lines += [f"  {'parameter':{width}}  count  dim     size"]
    for (name, dim, size, text), count in rows.items():
        lines.append(f"  {name:{width}}  {count:5}  {dim:3}  {size:7}  {text}")
    return lines


def _pattern(name: str) -> str:
    """`h.3.mlp.weight` -> `h.*.mlp.weight`: layers are listed together."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
