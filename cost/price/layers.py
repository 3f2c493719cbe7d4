"""Where in a microbatch a stage spends its time: seconds by layer, forward and backward.

A layer is a numbered module (`model.layers.3`); what is outside of those goes by its own module.
Layers come in the order in which they run. Their compute adds up to that of the part, without what
communication slows it by, and so do their collectives (`cost/price/stage_times.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autopar.cost.laws import CostModel
from autopar.cost.price.overlap import Calls, TimedCall, overlap_of, overlapped_of, waited_of
from autopar.cost.price.stage_times import LineTime, forward_lines, line_times
from autopar.program.communication import backward_parts
from autopar.program.graph import block_of
from autopar.program.lines import CallLine, StageProgram
from autopar.schedule import Kind


@dataclass(frozen=True)
class LayerWork:
    """Seconds of a run of lines of one layer in a microbatch, and the collectives that are its."""

    layer: str
    compute_s: float
    calls: Calls

    @property
    def waited_s(self) -> float:
        """Of collectives that compute waits for."""
        return waited_of(self.calls)

    @property
    def overlapped_s(self) -> float:
        """Of collectives that run beside compute."""
        return overlapped_of(self.calls)

    def by_phase(self) -> dict[str, tuple[float, float]]:
        """Phase of communication -> seconds waited for, and beside compute."""
        phases = dict.fromkeys(timed.call.phase for timed in self.calls)
        of = {phase: [c for c in self.calls if c.call.phase == phase] for phase in phases}
        return {phase: (waited_of(calls), overlapped_of(calls)) for phase, calls in of.items()}


def layer_works(program: StageProgram, cost: CostModel) -> dict[Kind, tuple[LayerWork, ...]]:
    """Of one microbatch's forward, and of its backward or both parts of it."""
    calls, modules = overlap_of(program, cost), _modules(program)
    first, second = backward_parts(program)
    found: dict[Kind, tuple[LayerWork, ...]] = {
        "forward": _works(forward_lines(program), calls.forward, modules)
    }
    if not program.splits_backward:
        return found | {"backward": _works(line_times(program, first), calls.backward, modules)}
    return found | {
        "backward_input": _works(line_times(program, first), calls.backward, modules),
        "backward_weight": _works(line_times(program, second), calls.weights, modules),
    }


def _works(lines: Iterable[LineTime], calls: Calls, modules: list[str]) -> tuple[LayerWork, ...]:
    compute_s: dict[str, float] = {}
    for line in lines:
        layer = modules[line.position]
        compute_s[layer] = compute_s.get(layer, 0.0) + line.n * line.time_s
    by_layer: dict[str, list[TimedCall]] = defaultdict(list)
    for timed in calls:
        by_layer[_layer(timed.call.tensor.split(", ")[0])].append(timed)
    # The calls of a layer without operators of its own come last.
    return tuple(
        LayerWork(layer, compute_s.get(layer, 0.0), tuple(by_layer[layer]))
        for layer in dict.fromkeys((*compute_s, *by_layer))
    )


def _modules(program: StageProgram) -> list[str]:
    """The layer of each line; lines that are no operators go with the operator before."""
    return list(_each_layer(program))


def _each_layer(program: StageProgram) -> Iterator[str]:
    layer = next((_layer(x.key) for x in program.body if isinstance(x, CallLine)), "")
    for line in program.body:
        if isinstance(line, CallLine):
            layer = _layer(line.key)
        yield layer


def _layer(name: str) -> str:
    """The layer of an operator (`model.layers.3.mlp/mm`) or a parameter (`lm_head.weight`)."""
    path = name.rpartition("/")[0] if "/" in name else name.rpartition(".")[0]
    return block_of(path) or path or "the model"
