"""The executor: runs one rank's part of a pipeline, action by action.

    step  =  gather parameters once          (ZeRO-1, ZeRO-2, tensor-parallel conversions)
             prologue                        divisors over the whole batch
             the schedule's actions
                 forward                     deliver inputs, run the stage's forward,
                                             take the new values of changed buffers
                 backward                    run the stage's backward on what forward saved, from
                                             the loss or from received gradients; add the
                                             gradients up; scatter ZeRO-2 gradients
                 send, recv                  posted without waiting
             synchronise gradients           bucketed, once; then sum tied parameters
             the loss to every rank
             store changed buffers           last: backwards may need their old values

Nothing runs under autograd. What forward saved is dropped while backward runs. Microbatches run
forward in order. Each takes the buffers that the previous one left, as when one process
accumulates gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from autopar.errors import StepError
from autopar.operators import seed_tensor, step_seed
from autopar.precision import working_dtype
from autopar.program.graph import Accumulation
from autopar.program.lines import Delivered, Local, Pipeline
from autopar.runtime.collectives import Crossings, Messenger, TiedGradients
from autopar.runtime.execute.conversions import Conversions, Use, add_gradient
from autopar.runtime.execute.delivery import deliver
from autopar.runtime.execute.returns import Returns
from autopar.runtime.flight import add_diagnosis
from autopar.runtime.groups import Group, current_context, phase
from autopar.schedule import Action, Kind

OutputsFn = Callable[[tuple[Tensor, ...]], None]


@dataclass
class Environment:
    """The runtime services that generated code and the executor use.

    `groups` are the stage's. `world` (a group of all ranks) and `messenger` join the stages, and
    may be missing when there is one stage.
    """

    device: torch.device
    groups: Mapping[tuple[int, ...], Group]
    messenger: Messenger | None = None
    world: Group | None = None

    def group(self, axes: tuple[int, ...]) -> Group:
        return self.groups[axes]


@dataclass(frozen=True)
class StageCode:
    """The compiled functions of one generated file.

    forward    (parameters, delivered[, received], env) -> (results), [saved]
    loss       (taken, env) -> the loss, from what forward returned in its place, when the step
               ends. None if forward returns the loss itself
    backward   (saved, cotangents, ready, env); calls `ready(k, gradient)` for the gradients of the
               parameters, then of what was received. None for a program without backward
    backward_input, backward_weight
               the same in two functions, of a program that splits backward:
               (saved, cotangents, ready, env) -> kept, which hands over the gradients of what was
               received, then (kept, ready, env), which frees `kept` as it goes
    has_graphs  are results of its regions valid until the next step begins, and no longer?
    """

    forward: Callable[..., tuple[tuple[Any, ...], list[Any]]]
    backward: Callable[..., None] | None
    prologue: Callable[..., tuple[Tensor, ...]] | None
    loss: Callable[..., Tensor] | None = None
    backward_input: Callable[..., list[Any]] | None = None
    backward_weight: Callable[..., None] | None = None
    has_graphs: bool = False


@dataclass
class _Step:
    """The values of one step."""

    stored: Mapping[str, Tensor]
    uses: Sequence[Use]
    inputs: Mapping[str, Tensor]
    scalars: Mapping[str, Tensor]
    buffers: dict[str, Tensor]
    seed: int
    is_local: bool
    on_outputs: OutputsFn | None
    weight: float = 1.0
    n_backwards: int = 0
    outputs: tuple[Any, ...] = ()
    # What forward returned for the loss, by microbatch; and what it saved, until its backward.
    losses: list[Any] = field(default_factory=list)
    saved: dict[int, list[Any]] = field(default_factory=dict)
    # Microbatch -> values of the messages still to be sent.
    activations: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)


class Executor:
    """Runs one rank of a pipeline.

    `rank` is the world rank; `code` is its stage's. `constants` maps placeholder names to whole
    tensors. `buffers` maps names to buffers; steps write those that they change.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        rank: int,
        code: StageCode,
        environment: Environment,
        constants: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.pipeline, self.rank, self.stage = pipeline, rank, pipeline.stage_of(rank)
        self._flight = current_context().flight
        self.program, self.code, self.environment = pipeline.stages[self.stage], code, environment
        self.coordinate = pipeline.meshes[self.stage].coordinate(rank)
        self.constants, self.buffers = constants, buffers or {}
        self.conversions = Conversions(self.program.parameters, environment.groups)
        periods = ("micro", "step")
        self._returns = {p: Returns(self.program, p, self.conversions) for p in periods}
        self.actions = pipeline.schedule.stages[self.stage]
        self._n_backwards = sum(action.kind == "backward" for action in self.actions)
        self._messages: dict[tuple[Kind, int], list[Action]] = {}
        for action in self.actions:
            self._messages.setdefault((action.kind, action.microbatch), []).append(action)
        self.crossings: Crossings | None = None
        self.ties: TiedGradients | None = None
        if pipeline.n_stages > 1:
            messenger = environment.messenger
            assert messenger is not None and environment.world is not None
            self.crossings = Crossings(pipeline, rank, messenger, environment.device)
            self.ties = TiedGradients(pipeline, rank, messenger, environment.groups)
        last = pipeline.stages[-1]
        self._made_loss = None if last.loss is None else last.variables[last.loss]
        # All ranks of the last stage have the loss and the outputs; this one shares them.
        self._is_loss_source = rank == pipeline.meshes[-1].first_rank
        self._constant_parts: dict[tuple[str, int], Tensor] = {}

    @torch.no_grad()
    def step(
        self,
        stored: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        is_local: bool = False,
        on_outputs: OutputsFn | None = None,
        seed: int = 0,
        weight: float = 1.0,
    ) -> Tensor:
        """Run forward and backward of every microbatch; gradients are added to `.grad`.

        `stored` maps parameter names to local shards. `inputs` maps placeholder names to the global
        tensors, or to this rank's rows if `is_local`. `on_outputs` is called on the last stage.
        `seed` is the step's (`Stream.seed`), equal on all ranks. `weight` multiplies the gradients.
        Returns the loss, detached and
        equal on all ranks.
        """
        with self._in_flight():
            kept = self.ties.detach_earlier(stored) if self.ties else {}
            scalars = {} if self.program.accumulation else self._scalars(inputs, is_local, seed)
            uses = self._uses(stored)
            for returns in self._returns.values():
                returns.begin(uses)
            buffers = dict(self.buffers)
            step = _Step(stored, uses, inputs, scalars, buffers, seed, is_local, on_outputs, weight)
            self._run(step)
            self._returns["step"].finish(stored)
            for returns in self._returns.values():
                returns.begin(())  # lets go of gathered parameters
            if self.ties:
                self.ties.sum(stored, kept)
            assert self._made_loss is not None, "a training program has a loss"
            loss = self._last_stage_value(self._loss(step), self._made_loss)
            if self.crossings:
                self.crossings.finish()
            self._store_buffers(step)
            return self._own(loss)

    @torch.no_grad()
    def forward(
        self,
        stored: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        is_local: bool = False,
        everywhere: bool = False,
        seed: int = 0,
    ) -> tuple[Any, ...]:
        """(loss or None, *outputs) of the whole batch as one microbatch, without gradients.

        The loss is the same on all ranks. Outputs are None except on the last stage, unless
        `everywhere`.
        """
        assert self.program.n_microbatches == 1
        with self._in_flight():
            uses, scalars = self._uses(stored), self._scalars(inputs, is_local, seed)
            step = _Step(stored, uses, inputs, scalars, dict(self.buffers), seed, is_local, None)
            self._run(step)
            if self.crossings:
                self.crossings.finish()
            self._store_buffers(step)
            last, made = self.pipeline.stages[-1], self._made_loss
            loss = None if made is None else self._last_stage_value(self._loss(step), made)
            loss = None if loss is None else self._own(loss)
            outputs: list[Tensor | None] = list(step.outputs) or [None] * len(last.outputs)
            if everywhere:
                outputs = [
                    self._last_stage_value(value, last.variables[name])
                    for value, name in zip(outputs, last.outputs, strict=True)
                ]
            return (loss, *outputs)

    def _uses(self, stored: Mapping[str, Tensor]) -> list[Use]:
        """The uses of parameters. Graphs read in place what stays where it is stored."""
        uses = self.conversions.uses(stored)
        for use in uses if self.code.has_graphs else ():
            if use.parameter.cast is None and not use.moves:
                torch._dynamo.mark_static_address(use.value, guard=False)
        return uses

    def _own(self, value: Tensor) -> Tensor:
        """A value that lives longer than the step, or until a message has gone at some time."""
        return value.clone() if self.code.has_graphs else value

    @contextmanager
    def _in_flight(self) -> Iterator[None]:
        """Note the step. An error says where it was raised, and breaks a pipeline.

        Messages of a step that failed half-way are left over: the next step would take them.
        """
        messenger = self.environment.messenger if self.crossings else None
        if messenger is not None and messenger.failed is not None:
            raise StepError(
                f"an earlier step failed half-way: {messenger.failed}",
                hint="start the processes again, from the last checkpoint",
            )
        self._flight.begin_step(self.stage)
        if self.code.has_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            yield
        except Exception as error:
            last = self._flight.last
            where = "" if last is None else f"{last['action']} {last['call'] or ''}".rstrip()
            error.add_note(f"rank {self.rank}, stage {self.stage}, in action {where}")
            self._flight.failed(error)
            add_diagnosis(error)
            if messenger is not None and last is not None and last["calls"]:
                messenger.failed = f"{type(error).__name__} on rank {self.rank}, {where}"
            raise
        self._flight.end_step()

    def _run(self, step: _Step) -> None:
        """Run the actions in order; consecutive messages go as one batch."""
        for is_compute, actions in itertools.groupby(self.actions, lambda a: a.is_compute):
            if not is_compute:
                self._post(list(actions), step)
                continue
            for action in actions:
                self._flight.act(str(action), self.stage)
                if action.kind == "forward":
                    self._forward(action.microbatch, step)
                else:
                    self._backward(action.microbatch, step)

    def _post(self, actions: Sequence[Action], step: _Step) -> None:
        assert self.crossings is not None
        self._flight.act(" ".join(map(str, actions)), self.stage)
        made = {"send_forward": step.activations, "send_backward": step.gradients}
        values = {a: made[a.kind][a.microbatch] for a in actions if a.is_send}
        self.crossings.post(actions, values)
        for action in actions:  # a value may go to several stages: keep it until the last send
            if action.is_send and self._is_last_send(action):
                del made[action.kind][action.microbatch]

    def _is_last_send(self, action: Action) -> bool:
        return self._messages[action.kind, action.microbatch][-1] == action

    def _peers(self, kind: Kind, microbatch: int) -> Sequence[Action]:
        """This stage's messages of one kind for a microbatch."""
        return self._messages.get((kind, microbatch), ())

    def _forward(self, index: int, step: _Step) -> None:
        received: dict[str, Tensor] = {}
        for action in self._peers("recv_forward", index):
            assert self.crossings is not None
            received |= self.crossings.arrived(action)
        (loss, *results), saved = self.code.forward(*self._arguments(index, step, received))
        n_sent, n_state = len(self.program.sent), len(self.program.sent) + len(self.program.changed)
        values = map(self._own, results[:n_sent])
        sent = {b.value: r for b, r in zip(self.program.sent, values, strict=True)}
        held = zip(self.program.changed, results[n_sent:n_state], strict=True)
        step.buffers.update((buffer.name, value) for buffer, value in held)
        step.outputs = tuple(map(self._own, results[n_state:]))
        if step.on_outputs is not None and self.stage == self.pipeline.n_stages - 1:
            step.on_outputs(step.outputs)
        if self._peers("send_forward", index):
            step.activations[index] = sent
        if loss is not None:
            step.losses.append(loss)
        if self.code.backward is not None:
            step.saved[index] = saved

    def _loss(self, step: _Step) -> Tensor | None:
        """The sum over microbatches; None on ranks that do not make it."""
        total: Tensor | None = None
        for taken in step.losses:
            part = taken if self.code.loss is None else self.code.loss(taken, self.environment)
            if self.program.n_microbatches > 1:  # a sum in half precision rounds at every term
                part = part.to(working_dtype(part.dtype))
            total = part if total is None else total + part
        assert self._made_loss is not None
        return None if total is None else total.to(self._made_loss.dtype)

    def _arguments(
        self, index: int, step: _Step, received: Mapping[str, Tensor]
    ) -> tuple[Any, ...]:
        parameters = [use.value for use in step.uses]
        if self.program.accumulation is not None:
            step = self._microbatch_value(step, index, self.program.accumulation)
        delivered = [self._deliver(item, step, index) for item in self.program.delivered]
        taken = [[received[b.value] for b in self.program.received]] if received else []
        return (parameters, delivered, *taken, self.environment)

    def _backward(self, index: int, step: _Step) -> None:
        cotangents = self._cotangents(index, step)
        if self._peers("send_backward", index):
            step.gradients[index] = {}
        assert self.code.backward is not None
        with phase("backward"):
            # It frees them one by one, as it does what is saved: nobody else may hold them.
            saved, ready = step.saved.pop(index), self._taking(index, step)
            self.code.backward(saved, cotangents, ready, self.environment)
        self._without_gradients(index, step)
        step.n_backwards += 1
        self._returns["micro"].finish(step.stored)

    def _cotangents(self, index: int, step: _Step) -> list[Tensor | None]:
        """The gradients of the loss and of sent values, in the order that backward takes."""
        given: dict[str, Tensor] = {}
        for action in self._peers("recv_backward", index):
            assert self.crossings is not None
            for value, gradient in self.crossings.arrived(action).items():
                known = given.get(value)
                given[value] = gradient if known is None else known + gradient
        found: list[Tensor | None] = []
        if self.program.loss is not None and (made := self._made_loss) is not None:
            device = self.environment.device
            found.append(torch.full(made.shape, step.weight, dtype=made.dtype, device=device))
        return found + [given.get(b.value) for b in self.program.sent]

    def _taking(self, index: int, step: _Step) -> Callable[[int, Tensor], None]:
        """What backward hands complete gradients of a microbatch to."""
        is_last = step.n_backwards + 1 == self._n_backwards
        sync = [self._returns["micro"], *([self._returns["step"]] if is_last else [])]

        def ready(position: int, gradient: Tensor) -> None:
            if position >= len(step.uses):
                boundary = self.program.received[position - len(step.uses)]
                if index in step.gradients and boundary.local.has_grad:
                    step.gradients[index][boundary.value] = self._own(gradient.contiguous())
                return
            use = step.uses[position]
            add_gradient(use, gradient, step.stored, self.code.has_graphs)
            for returns in sync:
                returns.ready(position)

        return ready

    def _without_gradients(self, index: int, step: _Step) -> None:
        """What was received and nothing depends on has gradient 0."""
        found = step.gradients.get(index)
        for boundary in self.program.received if found is not None else ():
            local, device = boundary.local, self.environment.device
            if found is not None and local.has_grad and boundary.value not in found:
                found[boundary.value] = torch.zeros(local.shape, dtype=local.dtype, device=device)

    def _last_stage_value(self, value: Tensor | None, made: Local) -> Tensor:
        """Share the last stage's value with every rank, as an all_reduce: other ranks add zeros."""
        if self.pipeline.n_stages == 1:
            assert value is not None
            return value
        if value is None or not self._is_loss_source:
            value = torch.zeros(made.shape, dtype=made.dtype, device=self.environment.device)
        assert self.environment.world is not None
        with phase("loss" if made.name == self.pipeline.stages[-1].loss else "output"):
            return self.environment.world.all_reduce(value)

    def _store_buffers(self, step: _Step) -> None:
        """Write in place, as the model itself would: others may hold the tensors."""
        for buffer in self.program.changed:
            self.buffers[buffer.name].copy_(step.buffers[buffer.name])

    def _deliver(self, item: Delivered, step: _Step, index: int) -> Tensor:
        if item.kind in ("divisor", "seed"):
            return step.scalars[item.source]
        if item.kind == "buffer":
            return self._part(step.buffers[item.source], item, index, False).contiguous()
        if item.kind == "constant":
            key = (item.local.name, index if item.batch_cell else 0)
            if key not in self._constant_parts:
                part = self._part(self.constants[item.source], item, index, False)
                self._constant_parts[key] = part.to(self.environment.device).contiguous()
            return self._constant_parts[key]
        value = self._part(step.inputs[item.source], item, index, step.is_local)
        # From pinned memory this does not wait; from other memory the driver stages it first.
        moved = value.to(self.environment.device, item.local.dtype, non_blocking=True)
        return moved.contiguous()

    def _microbatch_value(self, step: _Step, index: int, accumulation: Accumulation) -> _Step:
        """The step on the rows of one microbatch, with its own divisors and seed."""
        inputs, seed = accumulation.rows(step.inputs, index), step_seed(step.seed, index)
        return replace(step, inputs=inputs, scalars=self._scalars(inputs, False, seed))

    def _part(self, value: Tensor, item: Delivered, index: int, is_local: bool) -> Tensor:
        n_parts = 1 if self.program.accumulation else self.program.n_microbatches
        return deliver(
            value, item, index, n_parts, self.pipeline.n_blocks,
            self.program.axis_sizes, self.coordinate, is_local,
        )  # fmt: skip

    def _scalars(
        self, inputs: Mapping[str, Tensor], is_local: bool, seed: int
    ) -> dict[str, Tensor]:
        """The step's seed, and the prologue's divisors."""
        seeds = {d.source: seed_tensor(seed) for d in self.program.delivered if d.kind == "seed"}
        return seeds | self._divisors(inputs, is_local)

    def _divisors(self, inputs: Mapping[str, Tensor], is_local: bool) -> dict[str, Tensor]:
        """The prologue's scalars, over the whole batch."""
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
