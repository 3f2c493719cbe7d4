"""A `transformers.Trainer` that trains with `pm.step`, as one process would.

    trainer = AutoparTrainer(model, args, mesh=(1, 8), train_dataset=data)
    trainer.train()

Every rank runs the Trainer's own loop, and takes itself for the only process: same batches, same
counts, same schedule (`OneProcess`, `AutoparAccelerator`). What a step does is replaced:

    forward, backward    `pm.step`; the count of labels over the accumulated batches is an input of
                         the program, so a mean over them is that of one process
    clipping, norms      over all shards and stages
    optimizer            on `pm.parameters()`; weight decay by the names and layers of the model
    evaluation           `pm(...)` in evaluation mode, logits whole on every rank
    checkpoints          `autopar.save` beside the model in its own format, written by rank 0

`check_arguments` refuses what would train something else.
"""

from __future__ import annotations

import copy
import copyreg
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.training_args import ParallelMode
from transformers.utils import ModelOutput

from autopar import api
from autopar.errors import NotSupportedError, OptionError
from autopar.integrations.accelerate import AutoparAccelerator
from autopar.module import ParallelModule

STATE = "autopar"  # the folder of a checkpoint that `autopar.save` writes
SCHEDULER = "scheduler.pt"
_RECOMPUTE = 'options={"recompute": "full"}, or "selective"'
_PRECISION = 'options={"precision": ...}, see autopar/options.py'
# Argument -> what to write instead. They replace layers, or wrap what a parallel module generates.
_REFUSED = {
    "activation_checkpointing": _RECOMPUTE,
    "gradient_checkpointing": _RECOMPUTE,
    "fp16": _PRECISION,
    "bf16": _PRECISION,
    "fp16_full_eval": _PRECISION,
    "bf16_full_eval": _PRECISION,
    "torch_compile": "leave it out",
    "deepspeed": "leave it out: the plan shards what DeepSpeed would",
    "fsdp": "leave it out: the plan shards what FSDP would",
    "parallelism_config": "options={...} of autopar.parallelize",
    "neftune_noise_alpha": "draw the noise in the model",
    "use_liger_kernel": "leave it out: its kernels have no sharding rules",
    "save_on_each_node": "leave it out: rank 0 writes",
    "auto_find_batch_size": "give the batch size; memory_limit in options bounds memory",
}
# Their state has the shape of the parameter; what needs whole tensors is refused at its first step.
_OPTIMIZERS = "adamw_torch adamw_torch_fused sgd adagrad rmsprop adafactor".split()


class AutoparTrainer(Trainer):  # type: ignore[misc]
    """`transformers.Trainer` on every rank of a torchrun or `autopar.launch` job.

    model: the model on one process, with equal weights on every rank. mesh, options: those of
    `autopar.parallelize`; it is called when training or evaluation begins, for a batch of
    `train_dataset`. All else is the Trainer's. `args.per_device_train_batch_size` rows are the
    global batch, as on one process. `train` ends with the trained weights in `model`, on every
    rank. `parallel` is the parallel module; callbacks get it as their `model`.

    Raises `NotSupportedError` for arguments that it cannot follow (`check_arguments`).
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *rest: Any,
        mesh: Any,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._mesh, self._options = mesh, dict(options or {})
        self._parallel: ParallelModule | None = None
        check_arguments(type(self), args)
        if "loss_fn" in self._options:
            raise OptionError(
                "loss_fn among the options", hint="use the compute_loss_func= of Trainer"
            )
        self.accelerator: Any
        super().__init__(model, one_process(args), *rest, **kwargs)
        if self.model_init is not None or self.optimizer is not None:
            raise NotSupportedError(
                "model_init= or optimizers= of a Trainer that makes its parallel module later",
                hint="pass the model itself, and optimizer_cls_and_kwargs=(class, {...})",
            )
        if self.compute_loss_func is not None and not self.model_accepts_loss_kwargs:
            raise NotSupportedError(
                f"compute_loss_func with {type(model).__name__}, whose forward takes no "
                "num_items_in_batch, so that the count is no input of the program",
                hint="add **kwargs to its forward",
            )

    @property
    def parallel(self) -> ParallelModule:
        """The parallel module; made from the first batch of `train_dataset` when first asked for.

        Raises `OptionError` without a `train_dataset`.
        """
        if self._parallel is None:
            with same_randomness():
                batch = self._example()
            self._parallel = api.parallelize(
                self.model.train(), self._mesh, batch, loss_fn=self._loss_fn(), **self._options
            )
        return self._parallel

    def _example(self) -> dict[str, Any]:
        if self.train_dataset is None:
            raise OptionError(
                "there is no train_dataset to make a plan for",
                hint="AutoparTrainer(train_dataset=)",
            )
        loader = self.get_train_dataloader()
        rows = islice(iter(loader.dataset), self._train_batch_size)
        batch = loader.collate_fn(list(rows))
        return self._counted(self._prepare_inputs(batch), self._get_num_items_in_batch(
            [batch], self.args.device
        ))  # fmt: skip

    def _counted(self, inputs: Mapping[str, Any], n_items: Any) -> dict[str, Any]:
        """The inputs of a step, with the count of labels if the model takes it."""
        if not self.model_accepts_loss_kwargs or n_items is None:
            return dict(inputs)
        return {**inputs, "num_items_in_batch": torch.as_tensor(n_items)}

    def _loss_fn(self) -> Callable[[Any, Mapping[str, Any]], Tensor] | None:
        """`compute_loss_func` or label smoothing, on outputs of a model that saw no labels."""
        if self.label_smoother is None and self.compute_loss_func is None:
            return None

        def loss_fn(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
            labels, n_items = batch["labels"], batch.get("num_items_in_batch")
            outputs = _without_loss(outputs)
            if self.compute_loss_func is not None:
                loss: Tensor = self.compute_loss_func(outputs, labels, num_items_in_batch=n_items)
                return loss
            smoothed: Tensor = self.label_smoother(
                outputs, labels, shift_labels=self._shifts(), num_items_in_batch=n_items
            )
            return smoothed

        return loss_fn

    def _shifts(self) -> bool:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        return type(self.model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    # -- what the loop asks for --------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        AutoparAccelerator.around(self.accelerator)
        self.gather_function = self.accelerator.gather_for_metrics

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        return self.parallel

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        self.callback_handler.model = self.parallel
        return prepared

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = super().create_optimizer(self.parallel)
        return optimizer

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        names: list[str] = super().get_decay_parameter_names(self.model)
        return names

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """One `pm.step`; the loss is scaled for accumulation as `Trainer.training_step` does."""
        pm = self.parallel
        pm.train()
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            counts = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            is_scaled = counts or self.compute_loss_func is not None
        weight = 1.0 if is_scaled else 1.0 / self.current_gradient_accumulation_steps
        batch = self._counted(self._prepare_inputs(inputs), num_items_in_batch)
        loss = pm.step(**batch, weight=weight)
        return loss.as_subclass(Tensor) * weight

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.parallel.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.parallel.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:  # fmt: skip
        return super().prediction_step(
            _Everywhere(self.parallel, type(self.model).__name__),
            inputs, prediction_loss_only, ignore_keys,
        )  # fmt: skip

    def is_world_process_zero(self) -> bool:
        return _rank() == 0

    def is_local_process_zero(self) -> bool:
        return self.args.should_log

    # -- files -------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.train`; `model` has the trained weights when it ends."""
        result = super().train(*args, **kwargs)
        if all(p.device.type != "meta" for p in self.model.parameters()):
            self.model.load_state_dict(_from_rank_0(self.parallel.full_state_dict()))
        return result

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The model in its own format, whole; every rank must call it."""
        state = None if self._parallel is None else self.parallel.full_state_dict()
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state)
        _wait()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder, step = Path(output_dir), self.state.global_step
        api.save(self.parallel, _inner(self.optimizer), folder / STATE, step=step)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # the same on every rank
            super()._save_rng_state(output_dir)
        _wait()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Only checks the folder: weights are read with the optimizer."""
        _state_folder(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        api.load(self.parallel, _inner(self.optimizer), _state_folder(checkpoint))
        scheduler = torch.load(Path(checkpoint) / SCHEDULER, weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)

    def _load_best_model(self) -> None:
        api.load(self.parallel, None, _state_folder(self.state.best_model_checkpoint))


class OneProcess:
    """Mixed into the class of the arguments: this rank takes itself for the only process.

    `device` is still this rank's, and rank 0 still writes files and logs.
    """

    world_size = 1
    process_index = 0
    local_process_index = 0
    parallel_mode = ParallelMode.NOT_DISTRIBUTED
    place_model_on_device = False  # the model stays where it is; the plan places its shards

    @property
    def n_gpu(self) -> int:
        return min(1, super().n_gpu)  # type: ignore[misc]

    @property
    def should_save(self) -> bool:
        return _rank() == 0

    @property
    def should_log(self) -> bool:
        return _rank() == 0

    def __copy__(self) -> Any:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files have the arguments as the user wrote them."""
        users = type(self).__mro__[2]
        return copyreg._reconstructor, (users, object, None), self.__dict__  # type: ignore[attr-defined]


def one_process(args: TrainingArguments) -> TrainingArguments:
    """A copy of the arguments for a Trainer that takes itself for the only process."""
    _ = args.device  # joins the process group, as the user's arguments say
    twin = copy.copy(args)
    twin.__class__ = type(type(args).__name__, (OneProcess, type(args)), {})
    return twin


def check_arguments(kind: type, args: TrainingArguments) -> None:
    """Refuse arguments, and overridden methods, that a parallel module would not follow.

    Raises `NotSupportedError`, naming the argument and what to write instead.
    """
    for name, hint in _REFUSED.items():
        value = getattr(args, name, None)
        if value:
            raise NotSupportedError(f"TrainingArguments({name}={value!r})", hint=hint)
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer not in _OPTIMIZERS:
        raise NotSupportedError(
            f"TrainingArguments(optim={optimizer!r})",
            hint=f"one of {_OPTIMIZERS}, or optimizer_cls_and_kwargs=(class, {{...}})",
        )
    if kind.compute_loss is not Trainer.compute_loss:  # type: ignore[attr-defined]
        raise NotSupportedError(
            f"{kind.__name__}.compute_loss: a step is a program that is made once",
            hint="AutoparTrainer(compute_loss_func=), or return the loss from the model",
        )


@contextmanager
def same_randomness() -> Iterator[None]:
    """Random numbers that are drawn inside are drawn again after it."""
    python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(of_numpy)


class _Everywhere(nn.Module):
    """A parallel module in evaluation: outputs whole on every rank, the name of the model."""

    def __init__(self, module: ParallelModule, name: str) -> None:
        super().__init__()
        self._run, self._name = partial(module, gather="all"), name

    def forward(self, **inputs: Any) -> Any:
        return self._run(**inputs)

    def _get_name(self) -> str:
        return self._name


def _without_loss(outputs: Any) -> Any:
    """The outputs of a model that was given labels, as if it had not been."""
    if isinstance(outputs, ModelOutput):
        return type(outputs)(**{k: v for k, v in outputs.items() if k != "loss"})
    return outputs[1:] if isinstance(outputs, tuple) else outputs


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that Accelerate has wrapped."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _state_folder(checkpoint: str) -> Path:
    folder = Path(checkpoint) / STATE
    if not folder.is_dir():
        raise NotSupportedError(
            f"{checkpoint} has no folder `{STATE}`: another Trainer has written it, or "
            "save_only_model=True",
            hint="from_pretrained(checkpoint) for its weights; the optimizer starts anew",
        )
    return folder


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()


def _from_rank_0(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of rank 0, on every rank."""
    box = [dict(tensors)]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]
