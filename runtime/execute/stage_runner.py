"""One stage of a rank in a step: its inputs, what its forward saved, what its backward returns.

A rank runs one stage, or several, which are chunks. What a stage receives comes from other ranks
(`Inbox.messages`) or from another stage of this rank. What it sends is left in `activations` and
`gradients`, microbatch by microbatch, until its last message has gone.

Nothing runs under autograd. What forward saved is dropped while backward runs. Gradients of a
microbatch are added when its backward runs; a stage runs its backwards in the order of
microbatches, so every schedule gives the same sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from autopar.operators import seed_tensor, step_seed
from autopar.precision import working_dtype
from autopar.program.graph import Accumulation
from autopar.program.lines import Delivered, Pipeline
from autopar.runtime.execute.code import Environment, StageCode
from autopar.runtime.execute.conversions import Conversions, Use, add_gradient
from autopar.runtime.execute.delivery import deliver
from autopar.runtime.execute.returns import Returns
from autopar.runtime.groups import phase

OutputsFn = Callable[[tuple[Tensor, ...]], None]


@dataclass
class StepInputs:
    """What the stages of a rank share in one step; `buffers` has the newest values."""

    stored: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    buffers: dict[str, Tensor]
    seed: int
    is_local: bool
    on_outputs: OutputsFn | None = None
    weight: float = 1.0


@dataclass
class _Running:
    """The values of one stage in one step. Lists of microbatches are keyed by their number."""

    shared: StepInputs
    uses: Sequence[Use]
    scalars: Mapping[str, Tensor]
    n_backwards: int = 0
    outputs: tuple[Any, ...] = ()
    # What forward returned for the loss; what it saved; what is kept for the gradients of weights.
    losses: list[Any] = field(default_factory=list)
    saved: dict[int, list[Any]] = field(default_factory=dict)
    kept: dict[int, list[Any]] = field(default_factory=dict)


class StageRunner:
    """Runs one stage of a rank, of which `code` is.

    `constants` maps placeholder names to whole tensors. `activations` and `gradients` are what the
    stage sends, and returns, by microbatch.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        stage: int,
        rank: int,
        code: StageCode,
        environment: Environment,
        constants: Mapping[str, Tensor],
    ) -> None:
        self.pipeline, self.stage, self.code = pipeline, stage, code
        self.program, self.environment = pipeline.stages[stage], environment
        self.coordinate = pipeline.meshes[stage].coordinate(rank)
        self.constants = constants
        self.conversions = Conversions(self.program.parameters, environment.groups)
        self._returns = {
            period: Returns(self.program, period, self.conversions) for period in ("micro", "step")
        }
        self.activations: dict[int, dict[str, Tensor]] = {}
        self.gradients: dict[int, dict[str, Tensor]] = {}
        self._constant_parts: dict[tuple[str, int], Tensor] = {}
        last = pipeline.stages[-1]
        self._made_loss = None if last.loss is None else last.variables[last.loss]

    def begin(self, shared: StepInputs) -> None:
        """Begin a step: parameters are converted for use, and divisors made of the whole batch."""
        is_whole = self.program.accumulation is None
        scalars = self._scalars(shared) if is_whole else {}
        uses = self._uses(shared.stored)
        for returns in self._returns.values():
            returns.begin(uses)
        self.activations, self.gradients = {}, {}
        self.running = _Running(shared, uses, scalars)

    def end(self) -> None:
        """The gradients of the step go to storage; gathered parameters are let go."""
        self._returns["step"].finish(self.running.shared.stored)
        for returns in self._returns.values():
            returns.begin(())

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The outputs of the last microbatch; empty before it, and on all but the last stage."""
        return self.running.outputs

    def loss(self) -> Tensor | None:
        """The sum over microbatches; None on stages that do not make it."""
        total: Tensor | None = None
        for taken in self.running.losses:
            part = taken if self.code.loss is None else self.code.loss(taken, self.environment)
            if self.program.n_microbatches > 1:  # a sum in half precision rounds at every term
                part = part.to(working_dtype(part.dtype))
            total = part if total is None else total + part
        assert self._made_loss is not None
        return None if total is None else total.to(self._made_loss.dtype)

    def forward(self, index: int, received: Mapping[str, Tensor]) -> None:
        """Forward of a microbatch, from what it received; what it sends is in `activations`."""
        step = self.running
        (loss, *results), saved = self.code.forward(*self._arguments(index, received))
        n_sent, n_state = len(self.program.sent), len(self.program.sent) + len(self.program.changed)
        values = map(self.own, results[:n_sent])
        self.activations[index] = {
            b.value: r for b, r in zip(self.program.sent, values, strict=True)
        }
        held = zip(self.program.changed, results[n_sent:n_state], strict=True)
        step.shared.buffers.update((buffer.name, value) for buffer, value in held)
        step.outputs = tuple(map(self.own, results[n_state:]))
        if step.shared.on_outputs is not None and self.stage == self.pipeline.n_stages - 1:
            step.shared.on_outputs(step.outputs)
        if loss is not None:
            step.losses.append(loss)
        if self.code.backward is not None:
            step.saved[index] = saved

    def backward(self, index: int, returned: dict[str, Tensor]) -> None:
        """Backward of a microbatch, from the gradients of what it sent, which it takes away.

        The gradients of what it received are in `gradients`.
        """
        assert self.code.backward is not None
        with phase("backward"):
            self.code.backward(*self._backward_arguments(index, returned))
        self._finish_inputs(index)
        self._finish_weights()

    def backward_input(self, index: int, returned: dict[str, Tensor]) -> None:
        """The part of `backward` that other stages wait for."""
        assert self.code.backward_input is not None
        with phase("backward"):
            arguments = self._backward_arguments(index, returned)
            self.running.kept[index] = self.code.backward_input(*arguments)
        self._finish_inputs(index)

    def backward_weight(self, index: int) -> None:
        """The rest of `backward`: gradients of parameters."""
        assert self.code.backward_weight is not None
        with phase("backward"):
            kept = self.running.kept.pop(index)
            self.code.backward_weight(kept, self._taking(index), self.environment)
        self._finish_weights()

    def own(self, value: Tensor) -> Tensor:
        """A value that lives longer than the step, or until a message has gone at some time."""
        return value.clone() if self.code.has_graphs else value

    def _finish_weights(self) -> None:
        """The gradients of a microbatch are added up."""
        self.running.n_backwards += 1
        self._returns["micro"].finish(self.running.shared.stored)

    def _uses(self, stored: Mapping[str, Tensor]) -> list[Use]:
        """The uses of parameters. Graphs read in place what stays where it is stored."""
        uses = self.conversions.uses(stored)
        for use in uses if self.code.has_graphs else ():
            if use.parameter.cast is None and not use.moves:
                torch._dynamo.mark_static_address(use.value, guard=False)
        return uses

    def _arguments(self, index: int, received: Mapping[str, Tensor]) -> tuple[Any, ...]:
        step = self.running
        parameters = [use.value for use in step.uses]
        shared, scalars = step.shared, step.scalars
        if self.program.accumulation is not None:
            shared, scalars = self._microbatch_inputs(shared, index, self.program.accumulation)
        delivered = [self._deliver(item, shared, scalars, index) for item in self.program.delivered]
        taken = [[received[b.value] for b in self.program.received]] if received else []
        return (parameters, delivered, *taken, self.environment)

    def _backward_arguments(self, index: int, returned: dict[str, Tensor]) -> tuple[Any, ...]:
        """Backward frees what is saved, and gradients, one by one: nobody else may hold them."""
        saved, cotangents = self.running.saved.pop(index), self._cotangents(returned)
        returned.clear()
        return saved, cotangents, self._taking(index), self.environment

    def _cotangents(self, returned: Mapping[str, Tensor]) -> list[Tensor | None]:
        """The gradients of the loss and of sent values, in the order that backward takes."""
        found: list[Tensor | None] = []
        if self.program.loss is not None and (made := self._made_loss) is not None:
            weight = self.running.shared.weight
            found.append(
                torch.full(made.shape, weight, dtype=made.dtype, device=self.environment.device)
            )
        return found + [returned.get(b.value) for b in self.program.sent]

    def _taking(self, index: int) -> Callable[[int, Tensor], None]:
        """What backward hands complete gradients of a microbatch to."""
        step = self.running
        is_last = step.n_backwards + 1 == self.program.n_microbatches
        sync = [self._returns["micro"], *([self._returns["step"]] if is_last else [])]
        gradients = self.gradients.setdefault(index, {})

        def ready(position: int, gradient: Tensor) -> None:
            if position >= len(step.uses):
                boundary = self.program.received[position - len(step.uses)]
                if boundary.local.has_grad:
                    gradients[boundary.value] = self.own(gradient.contiguous())
                return
            use = step.uses[position]
            add_gradient(use, gradient, step.shared.stored, self.code.has_graphs)
            for returns in sync:
                returns.ready(position)

        return ready

    def _finish_inputs(self, index: int) -> None:
        """What was received and nothing depends on has gradient 0."""
        found = self.gradients[index]
        for boundary in self.program.received:
            local = boundary.local
            if local.has_grad and boundary.value not in found:
                found[boundary.value] = torch.zeros(
                    local.shape, dtype=local.dtype, device=self.environment.device
                )

    def _deliver(
        self, item: Delivered, shared: StepInputs, scalars: Mapping[str, Tensor], index: int
    ) -> Tensor:
        if item.kind in ("divisor", "seed"):
            return scalars[item.source]
        if item.kind == "buffer":
            return self._part(shared.buffers[item.source], item, index, False).contiguous()
        if item.kind == "constant":
            key = (item.local.name, index if item.batch_cell else 0)
            if key not in self._constant_parts:
                part = self._part(self.constants[item.source], item, index, False)
                self._constant_parts[key] = part.to(self.environment.device).contiguous()
            return self._constant_parts[key]
        value = self._part(shared.inputs[item.source], item, index, shared.is_local)
        # From pinned memory this does not wait; from other memory the driver stages it first.
        moved = value.to(self.environment.device, item.local.dtype, non_blocking=True)
        return moved.contiguous()

    def _microbatch_inputs(
        self, shared: StepInputs, index: int, accumulation: Accumulation
    ) -> tuple[StepInputs, dict[str, Tensor]]:
        """The inputs of one microbatch's rows, with its own divisors and seed."""
        own = replace(shared, inputs=accumulation.rows(shared.inputs, index))
        seed = step_seed(shared.seed, index)
        return own, self._scalars(replace(own, seed=seed, is_local=False))

    def _part(self, value: Tensor, item: Delivered, index: int, is_local: bool) -> Tensor:
        n_parts = 1 if self.program.accumulation else self.program.n_microbatches
        return deliver(
            value, item, index, n_parts, self.pipeline.n_blocks,
            self.program.axis_sizes, self.coordinate, is_local,
        )  # fmt: skip

    def _scalars(self, shared: StepInputs) -> dict[str, Tensor]:
        """The step's seed, and the prologue's divisors."""
        seed = shared.seed
        seeds = {d.source: seed_tensor(seed) for d in self.program.delivered if d.kind == "seed"}
        return seeds | self._divisors(shared)

    def _divisors(self, shared: StepInputs) -> dict[str, Tensor]:
        """The prologue's scalars, over the whole batch."""
        if self.code.prologue is None:
            return {}
        inputs = [shared.inputs[name] for name in self.program.prologue_inputs]
        values = self.code.prologue(*inputs)
        axes = self._prologue_axes() if shared.is_local else ()
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
