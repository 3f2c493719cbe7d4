"""The executor: runs one rank's part of a pipeline, action by action.

    step  =  of each of its stages:          (`stage_runner.py`)
                 gather parameters once      (ZeRO-1, ZeRO-2, tensor-parallel conversions)
                 prologue                    divisors over the whole batch
             the schedule's actions
                 forward                     deliver inputs, run the stage's forward,
                                             take the new values of changed buffers
                 backward                    run the stage's backward on what forward saved, from
                                             the loss or from received gradients; add the
                                             gradients up; scatter ZeRO-2 gradients. In one action,
                                             or in two: the gradients that other stages wait for,
                                             and those of weights
                 send, recv                  posted without waiting
             synchronise gradients           bucketed, once; then sum tied parameters
             the loss to every rank
             store changed buffers           last: backwards may need their old values

A rank has one stage, or several (chunks), which hand tensors on without a message. Microbatches run
forward in order. Each takes the buffers that the previous one left, as when one process
accumulates gradients.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autopar.errors import StepError
from autopar.program.lines import Local, Pipeline
from autopar.runtime.collectives import Crossings, TiedGradients
from autopar.runtime.execute.code import Environment, StageCode
from autopar.runtime.execute.stage_runner import OutputsFn, StageRunner, StepInputs
from autopar.runtime.flight import add_diagnosis
from autopar.runtime.groups import current_context, phase
from autopar.schedule import Action, Kind


class Executor:
    """Runs one rank of a pipeline.

    `rank` is the world rank; `codes` are those of its stages. `constants` maps placeholder names
    to whole tensors. `buffers` maps names to buffers; steps write those that they change.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        rank: int,
        codes: Mapping[int, StageCode],
        environment: Environment,
        constants: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.pipeline, self.rank, self.codes = pipeline, rank, codes
        self._flight = current_context().flight
        self.environment, self.constants, self.buffers = environment, constants, buffers or {}
        self.stages = {
            k: StageRunner(pipeline, k, rank, codes[k], environment, constants)
            for k in pipeline.stages_of(rank)
        }
        self.has_graphs = any(stage.code.has_graphs for stage in self.stages.values())
        self.actions = pipeline.schedule.rows[pipeline.device_of(rank)]
        # Of a stage, by kind and microbatch.
        self._messages: dict[tuple[int, Kind, int], list[Action]] = {}
        for action in self.actions:
            key = action.stage, action.kind, action.microbatch
            self._messages.setdefault(key, []).append(action)
        # Between stages of this rank: no message carries them.
        self._inside = [
            t
            for t in sorted(pipeline.schedule.transfers or ())
            if t.source in self.stages and t.target in self.stages
        ]
        # (stage, microbatch) -> what other stages of this rank handed it: activations by value,
        # gradients by stage and value.
        self._activations: defaultdict[tuple[int, int], dict[str, Tensor]] = defaultdict(dict)
        self._gradients: defaultdict[tuple[int, int], dict[int, Mapping[str, Tensor]]]
        self._gradients = defaultdict(dict)
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
        Returns the loss, detached and equal on all ranks.
        """
        with self._in_flight():
            kept = self.ties.detach_earlier(stored) if self.ties else {}
            buffers = dict(self.buffers)
            shared = StepInputs(stored, inputs, buffers, seed, is_local, on_outputs, weight)
            self._run(shared)
            for stage in self.stages.values():
                stage.end()
            if self.ties:
                self.ties.sum(stored, kept)
            assert self._made_loss is not None, "a training program has a loss"
            loss = self._last_stage_value(self._loss(), self._made_loss)
            if self.crossings:
                self.crossings.finish()
            self._store_buffers(buffers)
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
        assert self.pipeline.n_microbatches == 1
        with self._in_flight():
            buffers = dict(self.buffers)
            self._run(StepInputs(stored, inputs, buffers, seed, is_local))
            if self.crossings:
                self.crossings.finish()
            self._store_buffers(buffers)
            last, made = self.pipeline.stages[-1], self._made_loss
            loss = None if made is None else self._last_stage_value(self._loss(), made)
            loss = None if loss is None else self._own(loss)
            own = self.stages.get(self.pipeline.n_stages - 1)
            outputs: list[Tensor | None] = list(own.outputs) if own else []
            outputs = outputs or [None] * len(last.outputs)
            if everywhere:
                outputs = [
                    self._last_stage_value(value, last.variables[name])
                    for value, name in zip(outputs, last.outputs, strict=True)
                ]
            return (loss, *outputs)

    def _own(self, value: Tensor) -> Tensor:
        """A value that lives longer than the step."""
        return value.clone() if self.has_graphs else value

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
        self._flight.begin_step(min(self.stages))
        if self.has_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            yield
        except Exception as error:
            last = self._flight.last
            where = "" if last is None else f"{last['action']} {last['call'] or ''}".rstrip()
            noun = "stage" if len(self.stages) == 1 else "stages"
            stages = ", ".join(map(str, self.stages))
            error.add_note(f"rank {self.rank}, {noun} {stages}, in action {where}")
            self._flight.failed(error)
            add_diagnosis(error)
            if messenger is not None and last is not None and last["calls"]:
                messenger.failed = f"{type(error).__name__} on rank {self.rank}, {where}"
            raise
        self._flight.end_step()

    def _run(self, shared: StepInputs) -> None:
        """Run the actions in order; consecutive messages go as one batch."""
        self._activations.clear()
        self._gradients.clear()
        for stage in self.stages.values():
            stage.begin(shared)
        for is_compute, actions in itertools.groupby(self.actions, lambda a: a.is_compute):
            if not is_compute:
                self._post(list(actions))
                continue
            for action in actions:
                self._flight.act(str(action), action.stage)
                self._compute(action)

    def _compute(self, action: Action) -> None:
        runner, k = self.stages[action.stage], action.microbatch
        match action.kind:
            case "forward":
                runner.forward(k, self._read_activations(action))
                self._hand_on(action)
            case "backward":
                runner.backward(k, self._sum_gradients(action))
                self._hand_back(action)
            case "backward_input":
                runner.backward_input(k, self._sum_gradients(action))
                self._hand_back(action)
            case "backward_weight":
                runner.backward_weight(k)

    def _post(self, actions: Sequence[Action]) -> None:
        assert self.crossings is not None
        self._flight.act(" ".join(map(str, actions)), actions[0].stage)
        values = {a: self._outbox(a)[a.microbatch] for a in actions if a.is_send}
        self.crossings.post(actions, values)
        for action in actions:  # a value may go to several stages: keep it until the last send
            if action.is_send and self._peers(action)[-1] == action:
                del self._outbox(action)[action.microbatch]

    def _outbox(self, send: Action) -> dict[int, dict[str, Tensor]]:
        """What the sends of a stage take, by microbatch."""
        runner = self.stages[send.stage]
        return runner.activations if send.is_forward else runner.gradients

    def _peers(self, action: Action, kind: Kind | None = None) -> Sequence[Action]:
        """The messages of one kind that a stage has for a microbatch."""
        key = action.stage, kind or action.kind, action.microbatch
        return self._messages.get(key, ())

    def _read_activations(self, forward: Action) -> dict[str, Tensor]:
        """What a stage reads of other stages, for a microbatch."""
        received = self._activations.pop((forward.stage, forward.microbatch), {})
        for action in self._peers(forward, "recv_forward"):
            assert self.crossings is not None
            received |= self.crossings.arrived(action)
        return received

    def _sum_gradients(self, backward: Action) -> dict[str, Tensor]:
        """The gradients of what a stage sent, summed in the order of the stages that read it."""
        parts = self._gradients.pop((backward.stage, backward.microbatch), {})
        for action in self._peers(backward, "recv_backward"):
            assert self.crossings is not None and action.peer is not None
            parts[action.peer] = self.crossings.arrived(action)
        total: dict[str, Tensor] = {}
        for stage in sorted(parts):
            for value, gradient in parts[stage].items():
                known = total.get(value)
                total[value] = gradient if known is None else known + gradient
        return total

    def _hand_on(self, forward: Action) -> None:
        """Activations go to other stages of this rank; what no message takes is let go."""
        runner, k = self.stages[forward.stage], forward.microbatch
        for transfer in self._inside:
            if transfer.source == forward.stage:
                assert self.crossings is not None
                send, _ = transfer.forward(k)
                given = self.crossings.hand_over(send, runner.activations[k])
                self._activations[transfer.target, k] |= given
        if not self._peers(forward, "send_forward"):
            del runner.activations[k]

    def _hand_back(self, backward: Action) -> None:
        """Gradients go back to other stages of this rank; what no message takes is let go."""
        runner, k = self.stages[backward.stage], backward.microbatch
        for transfer in self._inside:
            if transfer.target == backward.stage and transfer.has_gradient:
                assert self.crossings is not None
                send, _ = transfer.backward(k)
                given = self.crossings.hand_over(send, runner.gradients[k])
                self._gradients[transfer.source, k][transfer.target] = given
        if not self._peers(backward, "send_backward"):
            del runner.gradients[k]

    def _loss(self) -> Tensor | None:
        """The sum over microbatches; None on ranks that do not make it."""
        last = self.stages.get(self.pipeline.n_stages - 1)
        return None if last is None else last.loss()

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

    def _store_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Write in place, as the model itself would: others may hold the tensors."""
        for stage in self.stages.values():
            for buffer in stage.program.changed:
                self.buffers[buffer.name].copy_(buffers[buffer.name])
