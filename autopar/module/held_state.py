"""What a rank holds of a parallel module: its shards, buffers and loss scale, and calls on them.

Names are the user's own. State dicts and whole tensors need every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import NotPlannedError, NotSupportedError
from autopar.module.job import own_rank
from autopar.module.planned_state import PlannedState
from autopar.module.unsharded import unsharded, write_configs
from autopar.operators import Stream
from autopar.options import Options
from autopar.planning import Plan
from autopar.runtime import state
from autopar.runtime.checkpoints import ModuleState, check_replicas
from autopar.runtime.groups import together_in
from autopar.runtime.state import (
    LossScale,
    LossScaler,
    state_dict,
)


class HeldState(nn.Module):
    """Base of `ParallelModule`. `_state_or_none` is None until there is a plan."""

    _model: tuple[nn.Module]
    _options: Options
    _device: torch.device
    _state_or_none: PlannedState | None

    @property
    def _state(self) -> PlannedState:
        """What there is once there is a plan; raises `NotPlannedError` before."""
        if self._state_or_none is None:
            raise NotPlannedError(
                "there is no plan yet: no example_inputs and no plan were given",
                hint="call pm.prepare(**batch), or pm.step(**batch) once",
            )
        return self._state_or_none

    @property
    def plan(self) -> Plan:
        """The plan; raises `NotPlannedError` before there is one."""
        return self._state.plan

    @property
    def stream(self) -> Stream:
        """The random numbers of steps: `base` is the seed, `n_steps` counts the steps so far.

        Raises `NotPlannedError` before a plan.
        """
        return self._state.stream

    @property
    def shards(self) -> dict[str, Tensor]:
        """Parameter name -> this rank's shard, a plain tensor with the shard of the gradient."""
        return self._state.shards

    @property
    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Parameter name -> parameter, of this rank's stage."""
        return dict(self._state.stored.parameters)

    @property
    def persistent_buffers(self) -> dict[str, Tensor]:
        """Name -> buffer, of the buffers on this rank that state dicts have."""
        stored = self._state.stored
        return {n: b for n, b in stored.buffers.items() if n not in stored.not_saved}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stage, under the user's names (`runtime/tensors`).

        Each has the shape of the whole tensor; this rank keeps a shard of it. Raises
        `NotPlannedError` before a plan.
        """
        _ = self._state
        yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The model's buffers on this rank: persistent constants, and what its stage changes.

        Raises `NotPlannedError` before a plan.
        """
        _ = self._state
        yield from super().named_buffers(prefix, recurse, remove_duplicate)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip gradients to norm `max_norm` over all shards; returns the norm before.

        With `error_if_nonfinite`, raises `RuntimeError` for a norm that is NaN or infinite. With
        `precision="fp16-mixed"`, such a norm skips the step (`loss_scale`).
        """
        scaler = self._state.scaler
        overflow = None if scaler is None else scaler.overflow()
        norm = state.clip_grad_norm_(
            self._state.place, self.shards, max_norm, norm_type, error_if_nonfinite, overflow
        )
        if scaler is not None:
            scaler.decide(norm)
        return norm

    @property
    def loss_scale(self) -> LossScale | None:
        """The scale of float16 gradients, and how many steps it skipped; None otherwise.

        `pm.step` scales and unscales; an optimizer step after an overflow on any rank changes
        nothing, on all ranks. Checkpoints keep it.
        """
        scaler = None if self._state_or_none is None else self._state_or_none.scaler
        return None if scaler is None else scaler.scale

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole tensors on rank 0's CPU, under the model's own names; {} on other ranks.

        Every rank must call it; raises `AbsentRanksError`, which names those that do not.
        """
        held = self._state
        with together_in("pm.full_state_dict()"):
            held.originals.seen()
            return state.full_state_dict(held.place, held.shards, self.persistent_buffers)

    def unsharded(self) -> nn.Module | None:
        """The user's model with the values of now, whole, on rank 0's CPU; None on other ranks.

        A copy in evaluation mode, of the user's own class: for its `generate`, evaluation on one
        process, or `save_pretrained`. Training goes on in this module, and does not change it. It
        takes the memory of the whole model, in the model's dtypes.

        Every rank must call it; raises `AbsentRanksError`, which names those that do not, and
        `NotSupportedError` if the model cannot be copied.
        """
        held = self._state
        with together_in("pm.unsharded()"):
            held.originals.seen()
            values = state.all_values(held.place, held.shards, held.stored.buffers)
            return None if own_rank() != 0 else unsharded(self._model[0], values)

    def write_configs(self, folder: Path) -> None:
        """Write the configs of a model of transformers to a folder; nothing for other models."""
        write_configs(self._model[0], folder)

    def full_gradients(self) -> dict[str, Tensor]:
        """Whole gradients on rank 0's CPU, by parameter name; {} on other ranks.

        A parameter that does not affect the loss has a gradient of zeros. Every rank must call it;
        raises `AbsentRanksError`, which names those that do not.
        """
        held = self._state
        with together_in("pm.full_gradients()"):
            return state.full_gradients(held.place, held.shards)

    def state_dict(  # type: ignore[override]
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """`DTensor`s of this rank's stage, under the model's own names after `prefix`.

        Every rank must call it. Raises `NotSupportedError` for `keep_vars`.
        """
        if keep_vars:
            raise NotSupportedError(
                "state_dict(keep_vars=True): the values are DTensors, and parameters are not",
                hint="dict(pm.named_parameters())",
            )
        held = self._state
        values = state_dict(held.place, held.shards, held.dtensor_mesh, self.persistent_buffers)
        out = {} if destination is None else destination
        out.update({prefix + name: value for name, value in values.items()})
        return out

    def checkpointed(self) -> ModuleState:
        """What checkpoints hold of this rank; raises `NotPlannedError` before a plan."""
        return ModuleState(
            self._state.place,
            self.own_parameters,
            self.persistent_buffers,
            self.stream,
            self.loss_scale,
        )

    def check_replicas(self) -> None:
        """Raise `DivergenceError` if ranks that hold the same shards have different bits.

        Every rank must call it; raises `AbsentRanksError`, which names those that do not. The
        error names parameter, ranks and hashes. Every byte that a rank stores is hashed once.
        """
        state = self.checkpointed()
        with together_in("pm.check_replicas()"):
            check_replicas(state)

    def note_seed(self) -> None:
        """torch has the seed of a checkpoint now: that is no `torch.manual_seed` to warn of."""
        self._state.seed = torch.initial_seed()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load values from whole tensors or `DTensor`s, under the model's own names.

        Every rank must call it; raises `AbsentRanksError`, which names those that do not,
        `StateError` for names and shapes that do not fit, and for the shards of one rank given to
        all, and `NotSupportedError` for `assign`.
        """
        if assign:
            raise NotSupportedError(
                "load_state_dict(assign=True): programs and optimizers hold this rank's shards",
                hint="leave assign out; the values are copied",
            )
        held = self._state
        with together_in("pm.load_state_dict(...)"):
            held.originals.seen()
            return state.load_state_dict(
                held.place, held.shards, state_dict, self.persistent_buffers, strict
            )

    def _scale_losses(self, scale: LossScale | None) -> None:
        """With float16, scale losses from now on."""
        if self._options.precision == "fp16-mixed" and scale is not None:
            everyone = state.everyone(self._state.place)
            self._state.scaler = LossScaler(everyone, self._device, self.zero_grad, scale)
