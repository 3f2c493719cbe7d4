"""An Accelerator for parallel modules: every rank does what one process would.

Accelerate splits data by rank, wraps modules in DDP, and steps a schedule once per process. A
parallel module takes the global batch, synchronises itself, and steps once:

    loaders       not split: a batch is the same on every rank
    modules       not wrapped; their loss has run backward
    schedules     one step for each optimizer step
    gather        nothing to gather: metrics of a parallel module are the same on every rank
    files         rank 0 is still the main process (`is_main_process`, `print`, trackers)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend
from torch import Tensor, nn

from autopar.errors import NotSupportedError
from autopar.module import ParallelModule

_WRAPPERS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)


class AutoparAccelerator(Accelerator):  # type: ignore[misc]
    """`accelerate.Accelerator` for scripts that train a `ParallelModule`.

        pm, optimizer, loader, scheduler = accelerator.prepare(pm, optimizer, loader, scheduler)
        for batch in loader:
            with accelerator.accumulate(pm):
                loss = pm.step(**batch, weight=1 / accelerator.gradient_accumulation_steps)
                accelerator.clip_grad_norm_(pm.parameters(), 1.0)
                optimizer.step(); scheduler.step(); optimizer.zero_grad()

    The batch of the loader is the global batch. `num_processes` is 1. Raises `NotSupportedError`
    for mixed precision, for DeepSpeed, FSDP and Megatron plugins, and for `dispatch_batches`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.check()

    @staticmethod
    def around(accelerator: Accelerator) -> AutoparAccelerator:
        """The same object, from now on as an `AutoparAccelerator`."""
        accelerator.__class__ = AutoparAccelerator
        accelerator.check()
        return accelerator

    def check(self) -> None:
        """Raise `NotSupportedError` if the configuration asks for what autopar decides."""
        if self.state.distributed_type in _WRAPPERS:
            raise NotSupportedError(
                f"Accelerate's {self.state.distributed_type.value} around a parallel module",
                hint="leave the plugin out; autopar.parallelize shards the model",
            )
        if self.mixed_precision != "no":
            raise NotSupportedError(
                f"Accelerate's mixed_precision={self.mixed_precision!r}: it wraps forward, and a "
                "parallel module has a generated program",
                hint='mixed_precision="no"; the option `precision` of autopar.parallelize',
            )
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise NotSupportedError(
                "Accelerate's dynamo plugin on a parallel module, which has no forward to compile",
                hint="leave dynamo_backend out",
            )
        if self.dataloader_config.dispatch_batches:
            raise NotSupportedError(
                "dispatch_batches=True, which gives each rank a part of the batch of rank 0",
                hint="leave it out: every rank reads the global batch",
            )
        if getattr(self, "parallelism_config", None) is not None:
            raise NotSupportedError(
                "Accelerate's parallelism_config around a parallel module",
                hint="leave it out; autopar.parallelize chooses the parallelism",
            )

    @property
    def distributed_type(self) -> DistributedType:
        return DistributedType.NO

    @property
    def num_processes(self) -> int:
        return 1

    @property
    def dispatch_batches(self) -> bool:
        return False

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """A parallel module itself; other modules on this rank's device, unwrapped."""
        if not isinstance(model, ParallelModule):
            prepared: nn.Module = super().prepare_model(model, *args, **kwargs)
            return prepared
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True  # else it takes as many steps as there are processes
        return prepared

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip gradients to `max_norm`; those of a whole parallel module over all its stages."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        own = {id(p) for p in given}
        for model in self._models:
            if isinstance(model, ParallelModule) and own == {id(p) for p in model.parameters()}:
                return model.clip_grad_norm_(max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type)

    def gather(self, tensor: Any) -> Any:
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        return input_data

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        return tensor

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole tensors of a parallel module on rank 0's CPU, {} on other ranks."""
        if isinstance(model, ParallelModule):
            return model.full_state_dict()
        state: dict[str, Any] = super().get_state_dict(model, unwrap)
        return state

    def save_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `NotSupportedError`."""
        raise NotSupportedError(
            "accelerator.save_state: it would write one rank's shards as if they were the model",
            hint="autopar.save(pm, optimizer.optimizer, path, step=)",
        )

    def load_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `NotSupportedError`."""
        raise NotSupportedError(
            "accelerator.load_state on a parallel module",
            hint="autopar.load(pm, optimizer.optimizer, path)",
        )

    def save_model(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `NotSupportedError`."""
        raise NotSupportedError(
            "accelerator.save_model: it would write one rank's shards as if they were the model",
            hint="state = pm.full_state_dict() on every rank; then save it on rank 0",
        )
