"""What is known of the collectives of parameters before anything is placed.

They are those of ZeRO, and the return of gradients. How they run, `cost/price/overlap.py` and
`autopar/program/rerun_lines.py` say. All that is said here holds whatever is placed, except where a
parameter of the first or the last block is not gathered: then its neighbours take its place. Of
stages of a pipeline, averages over all parameters are known instead: a stage has few blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from autopar.placement import TensorType
from autopar.program import (
    Operator,
    Program,
    block_of,
    buckets,
    numbered_module,
    sync_bucket_bytes,
)


class Gathering(NamedTuple):
    """What is known of one parameter.

    fused_bytes   of the parameters of its block: as much is gathered or reduced at once at most
    first_share   of its gathers and reductions that compute waits for, because none runs before the
                  first block's gathers, nor after their reductions
    again_share   of its gathers for backward, that compute waits for
    last_share    what returns of its gradient in a bucket that no compute runs beside: all of the
                  first parameter; of the others on average, if all return once a step
    again         the operators before whose backward it is gathered again
    """

    fused_bytes: int
    first_share: float
    again_share: float
    last_share: float
    again: frozenset[str]


def gathering_of(
    program: Program,
    operators: Sequence[Operator],
    tensors: Mapping[str, TensorType],
    every: Iterable[str],
    saved_inputs: Mapping[str, Sequence[str]],
    averages: bool,
) -> dict[str, Gathering]:
    """Of every parameter of a program, which may stand for one with more blocks.

    `every` are the parameters of that one, and `saved_inputs` what each operator saves for backward
    of the tensors that it reads. If `averages`, all have the same shares.
    """
    bytes_of = {n: _bytes(tensors[n]) for n in program.parameters}
    blocks = {n: numbered_module(p.name) or p.name for n, p in program.parameters.items()}
    total_bytes = sum(_bytes(tensors[name]) for name in every)
    in_blocks: dict[str, int] = {}
    for name, block in blocks.items():
        in_blocks[block] = in_blocks.get(block, 0) + bytes_of[name]
    readers = [(o, [n for n in o.inputs if n in blocks]) for o in operators]
    read = [name for _, names in readers for name in names]
    first = blocks[read[0]] if read else None
    returned = [(name, _bytes(tensors[name])) for name in every if tensors[name].has_grad]
    first_returned = {name for name, _ in returned[:1]}
    sizes = [size_bytes for _, size_bytes in returned]
    last_share = _last_share(sizes)
    if averages and sizes:
        last_share = (last_share * sum(sizes[1:]) + sizes[0]) / sum(sizes)
    average = in_blocks[first] / total_bytes if averages and first is not None else None
    again: dict[str, set[str]] = {}
    stays = _stays_gathered(program, [o for o, names in readers if names], averages)
    for operator in operators:
        for name in saved_inputs.get(operator.name, ()):
            if name in blocks and operator.name not in stays:
                again.setdefault(name, set()).add(operator.name)
    return {
        name: Gathering(
            in_blocks[block] if numbered_module(program.parameters[name].name) else total_bytes,
            float(block == first) if average is None else average,
            average or 0.0,
            1.0 if name in first_returned and not averages else last_share,
            frozenset(again.get(name, ())),
        )
        for name, block in blocks.items()
    }


def _last_share(sizes: Sequence[int]) -> float:
    """Of what returns in the last bucket, without the first parameter, as a share of all others."""
    total, others = sum(sizes), sum(sizes[1:])
    if not others:
        return 1.0
    steps = [[("gradient", size_bytes)] for size_bytes in reversed(sizes)]
    *_, last = buckets(steps, sync_bucket_bytes(total))
    return (last.size_bytes - sizes[0]) / others


def _stays_gathered(
    program: Program, readers: Sequence[Operator], is_stage: bool
) -> frozenset[str]:
    """The operators of the last run, which may stay gathered; none of a stage among several.

    `readers` are the operators that read parameters.
    """
    if not readers or is_stage:
        return frozenset()
    of = {o.name: block_of(program.keys[o.name]) for o in readers}
    last = readers[-1].name
    return frozenset(n for n, block in of.items() if n == last or (block and block == of[last]))


def _bytes(tensor: TensorType) -> int:
    """Of a parameter in use or of its gradient, whichever is larger."""
    return max(tensor.size_bytes, int(tensor.gradient_bytes(tensor.size_bytes)))
