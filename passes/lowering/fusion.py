"""Fuses a matmul and the bias added to it into one operator.

Capture splits biases from matmuls, because every rank with a partial sum would add the bias. Once
tensors are placed, most matmuls are not partial sums, and then

    add(mm(x, w), b)     = addmm(b, x, w)          x: m k, w: k n, b: n
    add(linear(x, w), b) = linear(x, w, b)

saves a pass over the output and a tensor of its size. The fusion is right on every rank, whatever
the placements: if a reshard stands between matmul and bias, the sum reads another variable.

The fused line keeps the matmul's place in the model. Its predicted time is the sum of both, so the
prediction stays the quantity that the search minimised. The saved pass is not credited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

from autopar.program.lines import CallLine, GatherLine, Line, Local, Ref, StoredParameter, Workspace
from autopar.rules import FUSED


def fuse_bias(
    body: Sequence[Line], parameters: Sequence[StoredParameter], kept: Set[str | None]
) -> list[Line]:
    """`body` with fused matmuls, each at the line that added its bias.

    `kept` are the variables that are read after the body.
    """
    biases = _biases(body, parameters)
    n_reads = Counter(name for line in body for name in line.reads)
    matmuls: dict[str, int] = {}
    out: list[Line | None] = list(body)
    for i, line in enumerate(body):
        if not isinstance(line, CallLine):
            continue
        for name, bias in _summands(line):
            at = matmuls.get(name)
            if at is None or bias not in biases or n_reads[name] > 1 or name in kept:
                continue
            matmul = body[at]
            assert isinstance(matmul, CallLine)
            moved_past = {n for between in body[at + 1 : i] for n in between.writes}
            if _is_bias(biases[bias], matmul, line) and moved_past.isdisjoint(matmul.reads):
                out[at], out[i] = None, _fused(matmul, line, bias)
        if line.target in FUSED and line.lowered is None and len(line.args) == 2:
            matmuls[line.outs[0].name] = i
    return [line for line in out if line is not None]


def _biases(body: Sequence[Line], parameters: Sequence[StoredParameter]) -> dict[str, Local]:
    """The parameters by the variable that the body reads them from."""
    found = {line.out.name: line.out for line in body if isinstance(line, GatherLine)}
    for p in parameters:
        locals_ = [p.stored] if p.period == "use" else [use.local for use in p.uses]
        found |= {local.name: local for local in locals_}
    return found


def _summands(line: CallLine) -> Iterator[tuple[str, str]]:
    """The two variables of a plain sum, in both orders; nothing for other lines."""
    if line.target == "aten.add.Tensor" and len(line.args) == 2 and not line.kwargs:
        first, second = line.args
        if isinstance(first, Ref) and isinstance(second, Ref):
            yield first.name, second.name
            yield second.name, first.name


def _is_bias(bias: Local, matmul: CallLine, total: CallLine) -> bool:
    """Has `bias` one number per column, and does the sum change neither shape nor dtype?"""
    before, after = matmul.outs[0], total.outs[0]
    return (
        before.shape == after.shape
        and bias.shape == before.shape[-1:]
        and bias.dtype == before.dtype == after.dtype
    )


def _fused(matmul: CallLine, total: CallLine, bias: str) -> CallLine:
    first, second = matmul.args
    is_mm = matmul.target == "aten.mm.default"
    a, b = matmul.workspace, total.workspace
    return replace(
        matmul,
        outs=total.outs,
        target=FUSED[matmul.target],
        args=(Ref(bias), first, second) if is_mm else (first, second, Ref(bias)),
        flops=matmul.flops + total.flops,
        model_flops=matmul.model_flops + total.model_flops,
        forward_s=matmul.forward_s + total.forward_s,
        backward_s=matmul.backward_s + total.backward_s,
        again_s=matmul.again_s + total.again_s,
        shares=(None,),
        workspace=Workspace(
            max(a.forward_bytes, b.forward_bytes),
            max(a.backward_bytes, b.backward_bytes),
            a.passed,
        ),
    )
