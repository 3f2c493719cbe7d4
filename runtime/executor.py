"""The executor: runs one rank's stage program, microbatch by microbatch.

    step  =  gather parameters once          (ZeRO-1, ZeRO-2, tensor-parallel conversions)
             prologue                        divisors over the whole batch
             per microbatch: deliver inputs, forward, backward, scatter ZeRO-2 gradients
             synchronise gradients           bucketed, once

Parameters the program uses as they are stored are its leaves directly, and autograd adds
to their `.grad`. Every other use placement is a leaf of its own whose gradient is brought
back to storage by the reverse of its moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.buckets import BUCKET_BYTES
from autopar.runtime.bucketed import bucketed_apply
from autopar.runtime.delivery import deliver, most_batch_shards
from autopar.runtime.groups import Group, phase
from autopar.runtime.regather import Regather
from autopar.stage_program import MoveLine, ParameterUse, StageProgram, StoredParameter

OutputsFn = Callable[[tuple[Tensor, ...]], None]


@dataclass
class Environment:
    """What generated code asks of the runtime."""

    device: torch.device
    groups: Mapping[tuple[int, ...], Group]
    regather: Regather = field(default_factory=Regather)

    def group(self, axes: tuple[int, ...]) -> Group:
        return self.groups[axes]

    def gathered(self, stored: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        return self.regather.gathered(stored, convert)


@dataclass(frozen=True)
class StageCode:
    """The compiled functions of one generated file."""

    microbatch: Callable[..., tuple[Any, ...]]
    prologue: Callable[..., tuple[Tensor, ...]] | None


class Executor:
    """Runs a stage program on this rank.

    `coordinate` is the rank's position on the stage's axes; `constants` maps placeholder
    names to whole tensors.
    """

    def __init__(
        self,
        program: StageProgram,
        code: StageCode,
        environment: Environment,
        coordinate: Sequence[int],
        constants: Mapping[str, Tensor],
    ) -> None:
        self.program, self.code, self.environment = program, code, environment
        self.coordinate = tuple(coordinate)
        self.constants = constants
        self.n_blocks = most_batch_shards(program.delivered, program.axis_sizes)
        self._constant_parts: dict[tuple[str, int], Tensor] = {}

    # -- one step --------------------------------------------------------------------------

    def step(
        self,
        stored: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        is_local: bool = False,
        on_outputs: OutputsFn | None = None,
    ) -> Tensor:
        """Forward and backward of every microbatch; gradients are added to `.grad`.

        `stored`: parameter name -> local shard. `inputs`: placeholder name -> the global
        tensor, or this rank's rows of it. Returns the loss, detached, the same everywhere.
        """
        leaves = self._leaves(stored)
        divisors = self._divisors(inputs, is_local)
        total: Tensor | None = None
        for index in range(self.program.n_microbatches):
            with self.environment.regather.hooks():
                loss, *outputs = self._run(leaves, stored, inputs, divisors, index, is_local)
            if on_outputs is not None:
                on_outputs(tuple(outputs))
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
            self._return_gradients(leaves, stored, "micro")
        self._return_gradients(leaves, stored, "step")
        assert total is not None
        return total

    @torch.no_grad()
    def forward(
        self, stored: Mapping[str, Tensor], inputs: Mapping[str, Tensor], is_local: bool = False
    ) -> tuple[Any, ...]:
        """(loss or None, *outputs), without gradients, as one microbatch."""
        assert self.program.n_microbatches == 1
        divisors = self._divisors(inputs, is_local)
        return self._run(self._leaves(stored), stored, inputs, divisors, 0, is_local)

    def _run(
        self,
        leaves: Mapping[str, Tensor],
        stored: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        divisors: Mapping[str, Tensor],
        index: int,
        is_local: bool,
    ) -> tuple[Any, ...]:
        parameters = []
        for p in self.program.parameters:
            if p.period == "use":
                parameters.append(stored[p.name])
            parameters += [leaves[use.local.name] for use in p.uses]
        delivered = [
            self._deliver(item, inputs, divisors, index, is_local)
            for item in self.program.delivered
        ]
        return self.code.microbatch(parameters, delivered, self.environment)

    # -- parameters ------------------------------------------------------------------------

    def _leaves(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every use placement as a tensor the program differentiates."""
        leaves: dict[str, Tensor] = {}
        waiting: list[tuple[StoredParameter, ParameterUse]] = []
        for p in self.program.parameters:
            for use in p.uses:
                if use.moves:
                    waiting.append((p, use))
                else:
                    leaves[use.local.name] = stored[p.name]
        if waiting:
            with phase("param_gather"):
                values = bucketed_apply(
                    [(stored[p.name].detach(), self._steps(use.moves)) for p, use in waiting],
                    BUCKET_BYTES,
                )
            for (p, use), value in zip(waiting, values, strict=True):
                # A value that is still the stored tensor needs a leaf of its own.
                leaf = value.detach().view_as(value)
                leaves[use.local.name] = leaf.requires_grad_(
                    stored[p.name].requires_grad and torch.is_grad_enabled()
                )
        return leaves

    def _return_gradients(
        self, leaves: Mapping[str, Tensor], stored: Mapping[str, Tensor], period: str
    ) -> None:
        """Bring gradients of converted uses back to storage and add them to `.grad`."""
        waiting: list[tuple[str, Tensor, tuple[MoveLine, ...]]] = []
        for p in self.program.parameters:
            for use in p.uses:
                leaf = leaves[use.local.name]
                if use.moves and p.period == period and leaf.grad is not None:
                    waiting.append((p.name, leaf.grad, use.moves))
                    leaf.grad = None
        if not waiting:
            return
        with phase("grad_sync"):
            values = bucketed_apply(
                [(g, self._steps(moves, backward=True)) for _, g, moves in waiting], BUCKET_BYTES
            )
        with torch.no_grad():
            for (name, _, _), value in zip(waiting, values, strict=True):
                parameter = stored[name]
                if parameter.grad is None:
                    parameter.grad = value.clone() if value._base is not None else value
                else:
                    parameter.grad += value

    def _steps(self, moves: Sequence[MoveLine], backward: bool = False) -> tuple[Any, ...]:
        if backward:
            return tuple(
                (m.move.backward, self._group(m), m.move.splits[::-1]) for m in reversed(moves)
            )
        return tuple((m.move.forward, self._group(m), m.move.splits) for m in moves)

    def _group(self, line: MoveLine) -> Group:
        return self.environment.group(line.move.axes)

    # -- inputs ----------------------------------------------------------------------------

    def _deliver(
        self,
        item: Any,
        inputs: Mapping[str, Tensor],
        divisors: Mapping[str, Tensor],
        index: int,
        is_local: bool,
    ) -> Tensor:
        if item.kind == "divisor":
            return divisors[item.source]
        if item.kind == "constant":
            key = (item.local.name, index if item.batch_cell else 0)
            if key not in self._constant_parts:
                part = self._part(self.constants[item.source], item, index, False)
                self._constant_parts[key] = part.to(self.environment.device).contiguous()
            return self._constant_parts[key]
        value = self._part(inputs[item.source], item, index, is_local)
        return value.to(self.environment.device, item.local.dtype)

    def _part(self, value: Tensor, item: Any, index: int, is_local: bool) -> Tensor:
        return deliver(
            value, item, index, self.program.n_microbatches, self.n_blocks,
            self.program.axis_sizes, self.coordinate, is_local,
        )  # fmt: skip

    def _divisors(self, inputs: Mapping[str, Tensor], is_local: bool) -> dict[str, Tensor]:
        """The prologue's scalars over the whole batch."""
        if self.code.prologue is None:
            return {}
        values = self.code.prologue(*(inputs[name] for name in self.program.prologue_inputs))
        axes = self._prologue_axes() if is_local else ()
        with phase("loss"):
            return {
                name: (self.environment.group(axes).all_reduce(value) if axes else value).to(
                    self.environment.device
                )
                for name, value in zip(self.program.prologue_outputs, values, strict=True)
            }

    def _prologue_axes(self) -> tuple[int, ...]:
        """The axes that split the rows the prologue reads."""
        for item in self.program.delivered:
            if item.source in self.program.prologue_inputs and item.batch_cell is not None:
                return tuple(sorted(item.local.spec.axes_of(item.batch_cell)))
        return ()
