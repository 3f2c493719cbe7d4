"""What is known of the collectives of parameters before anything is placed.

They are those of ZeRO, and the return of gradients. How they run,
`autopar/program/communication/order.py` and `cost/price/overlap.py` say. All that is said here
holds whatever is placed, except where a parameter of the first or the last block is not gathered:
then its neighbours take its place. Which blocks are in a stage is open, so averages over all
parameters are known instead, or the least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from autopar.placement import TensorType
from autopar.program.communication import buckets, sync_bucket_bytes
from autopar.program.graph import Operator, Program

# What is known: of a whole program all; of stages averages, or what holds for any stage at least.
Gathers = Literal["whole", "stages", "least"]


class Gathering(NamedTuple):
    """What is known of one parameter.

    fused_bytes   of the parameters of its block: as much is gathered or reduced at once at most
    first_share   of its gathers and reductions that compute waits for, because none runs before the
                  first block's gathers, nor after their reductions
    again_share   of its gathers for backward, that compute waits for
    last_share    what returns of its gradient in a bucket that no compute runs beside: all of the
                  first parameter; of the others on average, if all return once a step
    micro_share   the same if it returns per microbatch: how much else does is open, so of a whole
                  program the least
    may_be_last   what all gradients together wait for in that bucket, where each of them takes as
                  long per byte as this one: as a multiple of what of this one does not wait. 0 if
                  the last share is no average, or of stages
    again         the operators before whose backward it is gathered again
    stays         the operators for whose backward it stays gathered, or comes as the loss's begins
    """

    fused_bytes: int
    first_share: float
    again_share: float
    last_share: float
    micro_share: float
    may_be_last: float
    again: frozenset[str]
    stays: frozenset[str]


def gathering_of(
    program: Program,
    operators: Sequence[Operator],
    tensors: Mapping[str, TensorType],
    saved_inputs: Mapping[str, Sequence[str]],
    gathers: Gathers,
) -> dict[str, Gathering]:
    """Of every parameter of a program, with all of its blocks.

    `saved_inputs` are what each operator saves for backward of the tensors that it reads. All
    parameters of stages have the same shares.
    """
    blocks = {n: program.parameter_block(n) or p.name for n, p in program.parameters.items()}
    in_blocks = Counter[str]()
    for name, block in blocks.items():
        in_blocks[block] += _bytes(tensors[name])
    total_bytes = in_blocks.total()
    readers = [o for o in operators if not blocks.keys().isdisjoint(o.inputs)]
    first = next((blocks[n] for o in readers for n in o.inputs if n in blocks), None)
    if gathers == "least":
        none = 0.0, 0.0, 0.0, 0.0, 0.0, frozenset[str](), frozenset[str]()
        return {name: Gathering(max(total_bytes, 1), *none) for name in blocks}
    in_stages = gathers == "stages"
    average = in_blocks[first] / total_bytes if in_stages and first else 0.0
    returned = {n: _bytes(tensors[n]) for n in blocks if tensors[n].has_grad}
    last_share = _last_share([*returned.values()], in_stages)
    last_run = _last_run(program, readers, in_stages)
    saving = _savers(operators, saved_inputs)

    def of(name: str) -> Gathering:
        is_numbered = program.parameter_block(name) is not None
        is_last = not in_stages and name == next(iter(returned), None)
        last = 1.0 if is_last else last_share
        may_be_last = 0.0
        if 0 < last < 1 and not in_stages:
            may_be_last = last / (1 - last) * total_bytes / _bytes(tensors[name])
        return Gathering(
            in_blocks[blocks[name]] if is_numbered else total_bytes,
            average if in_stages else float(blocks[name] == first),
            average,
            last,
            last if in_stages or last == 1 else 0.0,
            may_be_last,
            saving.get(name, frozenset()) - last_run,
            saving.get(name, frozenset()) & last_run,
        )

    return {name: of(name) for name in blocks}


def _last_share(sizes: Sequence[int], in_stages: bool) -> float:
    """What returns in the last bucket, as a share; without the first parameter, or in stages with
    it. `sizes` are the bytes of gradients, in order of parameters."""
    total, others = sum(sizes), sum(sizes[1:])
    if not others:
        return 1.0
    steps = [[("gradient", size_bytes)] for size_bytes in reversed(sizes)]
    *_, last = buckets(steps, sync_bucket_bytes(total))
    return last.size_bytes / total if in_stages else (last.size_bytes - sizes[0]) / others


def _savers(
    operators: Sequence[Operator], saved: Mapping[str, Sequence[str]]
) -> dict[str, frozenset[str]]:
    """Value -> the operators that save it for backward."""
    found: dict[str, set[str]] = {}
    for operator in operators:
        for name in saved.get(operator.name, ()):
            found.setdefault(name, set()).add(operator.name)
    return {name: frozenset(of) for name, of in found.items()}


def _last_run(program: Program, readers: Sequence[Operator], in_stages: bool) -> frozenset[str]:
    """The operators of the last run, whose parameters may stay gathered; none of those in stages.

    `readers` are the operators that read parameters.
    """
    if not readers or in_stages:
        return frozenset()
    of = {o.name: program.block(o.name) for o in readers}
    last = readers[-1].name
    return frozenset(n for n, block in of.items() if n == last or (block and block == of[last]))


def _bytes(tensor: TensorType) -> int:
    """Of a parameter in use or of its gradient, whichever is larger."""
    return max(tensor.size_bytes, int(tensor.gradient_bytes(tensor.size_bytes)))
