"""The parallel module: what `autopar.parallelize` returns, an `nn.Module` that trains.

Rank 0 plans; every rank captures the same graph, takes rank 0's plan as text, checks the
graph's hash and lays the plan on its own capture. Parameters are the stored shards, under
the user's names. Every input shape, and evaluation, is a program of its own over the same
shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.capture import capture
from autopar.codegen import emit, file_name
from autopar.cost.model import CostModel
from autopar.errors import (
    BatchError,
    NotPlannedError,
    NotSupportedError,
    OptionError,
)  # fmt: skip
from autopar.facts import Storage
from autopar.job import from_rank_0, join_process_group, own_rank
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.constraints import Constraints
from autopar.passes.intra_op import Analysis, choose
from autopar.passes.lower import lower
from autopar.passes.replay import plan_texts, replay
from autopar.pipeline import Pipeline
from autopar.plan_data import PlanData
from autopar.planning import (
    Plan,
    bind,
    check_mesh,
    example_of,
    has_nested_inputs,
    plan_program,
)  # fmt: skip
from autopar.program import Program, flatten_inputs
from autopar.runtime import state
from autopar.runtime.delivery import batch_index
from autopar.runtime.dtensors import state_dict
from autopar.runtime.executor import Environment, Executor
from autopar.runtime.groups import make_groups
from autopar.runtime.load import load_code
from autopar.runtime.weights import initial_buffers, initial_shards
from autopar.stage_program import (
    StageProgram,
    StoredParameter,
    batch_shards,
    most_batch_shards,
)
from autopar.verifier import verify_program

Signature = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Built:
    """One captured and compiled program: of one mode, one input signature."""

    program: Program
    stage: StageProgram
    executor: Executor
    code_path: Path


class ParallelModule(nn.Module):
    """A model sharded by a plan. Make it with `autopar.parallelize`."""

    def __init__(self, model: nn.Module, mesh: Mesh, options: Options, weights: str) -> None:
        super().__init__()
        self._model = (model,)  # in a tuple, so that it is no submodule
        self._mesh, self._options, self._weights = mesh, options, weights
        self._device = join_process_group(mesh)
        self._plan: Plan | None = None
        self._dtensor_mesh: DeviceMesh | None = None
        self._built: dict[tuple[bool, bool, Signature], Built] = {}
        self.training = model.training

    # -- planning ------------------------------------------------------------------------------

    @property
    def code_path(self) -> Path:
        """The generated file of the planned program on this machine."""
        _ = self.plan
        return next(iter(self._built.values())).code_path

    @property
    def plan(self) -> Plan:
        """The plan in force; raises `NotPlannedError` before there is one."""
        if self._plan is None:
            raise NotPlannedError(
                "there is no plan yet: no example_inputs and no plan were given",
                hint="call pm.prepare(**batch), or pm.step(**batch) once",
            )
        return self._plan

    def prepare(self, *args: Any, **kwargs: Any) -> ParallelModule:
        """Plan for a batch like this one, unless there is a plan. Returns self."""
        if self._plan is None:
            self._make_plan(args if args else kwargs)
        return self

    def _make_plan(self, batch: Mapping[str, Any] | Sequence[Any]) -> None:
        program = self._capture(batch, training=True)

        def on_rank_0() -> PlanData:
            return plan_program(program, self._mesh, batch, self._options).data

        self._adopt(from_rank_0(on_rank_0), program)

    def _use_plan(self, plan: Plan, batch: Mapping[str, Any] | Sequence[Any] | None = None) -> None:
        """Take rank 0's plan; `batch` serves where a plan cannot rebuild nested inputs."""
        data = from_rank_0(lambda: plan.data)
        check_mesh(data, self._mesh)
        example = batch if has_nested_inputs(data) and batch is not None else example_of(data)
        self._adopt(data, self._capture(example, training=True))

    def _adopt(self, data: PlanData, program: Program) -> None:
        analysis = Analysis.of(program, data.batch_dims or None)
        bound = bind(data, analysis, self._mesh)
        assert bound.bound is not None
        stage = bound.bound.program
        self._groups = make_groups(bound.bound.mesh)
        self._cost_mesh = bound.bound.mesh
        self._coordinate = bound.bound.mesh.coordinate(own_rank())
        shards = initial_shards(
            stage.parameters, self._weights, self._model[0], stage.axis_sizes,
            self._coordinate, self._device,
        )  # fmt: skip
        for name, parameter in shards.items():
            self._parameters[name] = parameter
        # Persistent buffers are constants of the program: no step changes them.
        self.constant_buffers = initial_buffers(self._model[0], torch.device("cpu"))
        self._plan = bound
        signature = _signature({i.path: _Like(i.shape) for i in data.inputs}, data.static_inputs)
        self._built[True, False, signature] = self._compile(program, stage)

    def _capture(self, batch: Mapping[str, Any] | Sequence[Any], training: bool) -> Program:
        return capture(
            self._model[0], batch, training=training, precision=self._options.precision,
            loss_fn=self._options.loss_fn if training else None,
        )  # fmt: skip

    def _compile(self, program: Program, stage: StageProgram) -> Built:
        verify_program(stage)
        code, path = load_code(file_name(0), emit(stage))
        constants = {
            name: make() for name, make in program.constants.items() if _taken(stage, name)
        }
        environment = Environment(self._device, self._groups)
        executor = Executor(
            Pipeline.single(stage, self._cost_mesh), own_rank(), code, environment, constants
        )
        return Built(program, stage, executor, path)

    # -- programs ------------------------------------------------------------------------------

    def _program(self, batch: Mapping[str, Any] | Sequence[Any], with_outputs: bool) -> Built:
        """The compiled program for this mode and these shapes."""
        leaves = flatten_inputs(batch)
        tensors = {k: v for k, v in leaves.items() if isinstance(v, Tensor)}
        signature = _signature(tensors, {k: v for k, v in leaves.items() if k not in tensors})
        key = (self.training, with_outputs, signature)
        if key not in self._built:
            program = self._capture(batch, self.training)
            make = self._train_stage if self.training else self._eval_stage
            self._built[key] = self._compile(program, make(program, with_outputs))
        return self._built[key]

    def _cost(self) -> CostModel:
        assert self.plan.bound is not None
        return self.plan.bound.cost

    def _train_stage(self, program: Program, with_outputs: bool) -> StageProgram:
        """The plan laid on a graph of other shapes."""
        data, cost = self.plan.data, self._cost()
        analysis = Analysis.of(program, data.batch_dims or None)
        self._check_batch(analysis.batch.size, data.microbatches)
        strategy = replay(
            analysis,
            data.parameters,
            data.operators,
            cost.mesh.sizes,
            data.microbatches,
            data.forbid,
        )
        return lower(analysis, strategy, cost, with_outputs)

    def _eval_stage(self, program: Program, with_outputs: bool) -> StageProgram:
        """A forward program over the same shards: storage is fixed, the rest is planned."""
        analysis = Analysis.of(program, self.plan.data.batch_dims or None)
        cost = self._cost()
        names = {info.name: placeholder for placeholder, info in program.parameters.items()}
        assert self.plan.bound is not None
        stored = {
            names[p.name]: Storage(p.stored.spec, p.period)
            for p in self.plan.bound.program.parameters
            if p.name in names
        }

        def on_rank_0() -> tuple[dict[str, str], dict[str, str]]:
            constraints = Constraints(storage=stored)
            chosen = choose(analysis, cost, 1, constraints, self.plan.data.optimizer, None)
            return plan_texts(analysis, chosen.strategy)

        parameters, operators = from_rank_0(on_rank_0)
        strategy = replay(analysis, parameters, operators, cost.mesh.sizes, 1)
        return lower(analysis, strategy, cost, with_outputs)

    def _check_batch(self, n_rows: int, n_microbatches: int) -> None:
        assert self.plan.bound is not None
        stage = self.plan.bound.program
        n = n_microbatches * most_batch_shards(stage.delivered, stage.axis_sizes)
        if n_rows % n:
            raise BatchError(
                f"a batch of {n_rows} rows does not divide by {n}: {n_microbatches} microbatches "
                f"x {n // n_microbatches} ranks that split the batch",
                hint="set drop_last=True in the loader, or use a batch size that divides",
            )

    # -- running -------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        batch: str = "global",
        outputs: Callable[[Any], None] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Forward and backward of every microbatch; gradients are synchronised on return.

        Inputs are the global batch, the same on every rank; with `batch="local"` only the
        rows of `local_slice`. `outputs` sees each microbatch's outputs, in the model's own
        structure. Returns the loss: detached, 0-d, the same on every rank. Gradients add to
        `.grad`.

        Raises `BatchError` when the batch does not divide.
        """
        if batch not in ("global", "local"):
            raise OptionError(f'batch={batch!r}: it is "global" or "local"')
        if not self.training:
            raise OptionError("step in evaluation mode", hint="call pm.train() first")
        given: Mapping[str, Any] | Sequence[Any] = args if args else kwargs
        if self._plan is None:
            if batch == "local":
                raise NotPlannedError(
                    "a local batch says nothing of the global one",
                    hint="call pm.prepare(**global_batch) first",
                )
            self.prepare(*args, **kwargs)
        assert self.plan.bound is not None
        self._inputs(self.plan.bound.analysis.program, given)  # before a trace fails on it
        whole = self._globalised(given) if batch == "local" else given
        built = self._program(whole, outputs is not None)
        on_outputs = None
        if outputs is not None:
            rebuild, handler = built.program.rebuild, outputs
            on_outputs = lambda tensors: handler(rebuild(tensors))  # noqa: E731
        return built.executor.step(
            self.shards, self._inputs(built.program, given), batch == "local", on_outputs
        )

    def forward(self, *args: Any, gather: str = "last", **kwargs: Any) -> Any:
        """The model's own output for a global batch, without gradients.

        The loss is on every rank, other tensors whole on the last stage's ranks (all ranks,
        with one stage); `gather="all"` puts them everywhere.
        """
        if gather not in ("last", "all"):
            raise OptionError(f'gather={gather!r}: it is "last" or "all"')
        given: Mapping[str, Any] | Sequence[Any] = args if args else kwargs
        if self._plan is None:
            raise NotPlannedError(
                "the module is not planned yet", hint="call pm.prepare(**batch) in training mode"
            )
        if self.training:
            raise NotSupportedError(
                "calling the module in training mode", hint="use pm.step(**batch), or pm.eval()"
            )
        built = self._program(given, True)
        _, *tensors = built.executor.forward(self.shards, self._inputs(built.program, given))
        return built.program.rebuild(tensors)

    @staticmethod
    def _inputs(program: Program, given: Mapping[str, Any] | Sequence[Any]) -> dict[str, Tensor]:
        leaves = flatten_inputs(given)
        missing = [i.path for i in program.inputs.values() if i.path not in leaves]
        if missing:
            raise BatchError(f"the batch lacks {missing}; it has {sorted(leaves)}")
        return {name: leaves[info.path] for name, info in program.inputs.items()}

    def local_slice(self, name: str) -> slice | None:
        """Which rows of input `name` this rank uses; None: all of them."""
        assert self.plan.bound is not None
        program, stage = self.plan.bound.analysis.program, self.plan.bound.program
        paths = {info.path: placeholder for placeholder, info in program.inputs.items()}
        if name not in paths:
            raise OptionError(f"there is no input {name!r}; inputs are {sorted(paths)}")
        items = [d for d in stage.delivered if d.source == paths[name]]
        counts = {batch_shards(d, stage.axis_sizes) for d in items}
        if counts in (set(), {1}) or len(counts) > 1:
            return None
        (n_shards,) = counts
        rows = self.plan.bound.analysis.batch.size // n_shards
        index = batch_index(items[0], stage.axis_sizes, self._coordinate)
        return slice(index * rows, (index + 1) * rows)

    def _globalised(
        self, given: Mapping[str, Any] | Sequence[Any]
    ) -> Mapping[str, Any] | Sequence[Any]:
        """Meta tensors of the global shapes a local batch stands for."""
        assert self.plan.bound is not None
        stage, program = self.plan.bound.program, self.plan.bound.analysis.program
        whole: dict[str, Any] = dict(flatten_inputs(given))
        for placeholder, info in program.inputs.items():
            value = whole.get(info.path)
            items = [d for d in stage.delivered if d.source == placeholder and d.batch_cell]
            if not isinstance(value, Tensor) or not items or self.local_slice(info.path) is None:
                continue
            assert items[0].batch_cell is not None
            shape = list(value.shape)
            shape[items[0].batch_cell[0]] *= batch_shards(items[0], stage.axis_sizes)
            whole[info.path] = torch.empty(shape, dtype=value.dtype, device="meta")
        if isinstance(given, Mapping):
            return whole
        return tuple(whole[str(i)] for i in range(len(whole)))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported; raises `NotSupportedError` with the way to do it."""
        raise NotSupportedError(
            "generate() on a parallel module",
            hint="load pm.full_state_dict() into the original model on one process",
        )

    # -- state ---------------------------------------------------------------------------------

    @property
    def shards(self) -> dict[str, nn.Parameter]:
        """Parameter name -> this rank's shard."""
        return {name: p for name, p in self._parameters.items() if p is not None}

    @property
    def stored(self) -> tuple[StoredParameter, ...]:
        assert self.plan.bound is not None
        return self.plan.bound.program.parameters

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards under the user's names; raises `NotPlannedError` before a plan."""
        _ = self.plan
        yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients to at most `max_norm`, over all shards; returns the norm before."""
        return state.clip_grad_norm_(
            self.stored, self.shards, max_norm, self._coordinate, self._groups, norm_type
        )

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole tensors on the CPU of rank 0, under the model's own names; {} elsewhere."""
        return state.full_state_dict(
            self.stored, self.shards, self._sizes(), self._coordinate, self._groups,
            self.constant_buffers,
        )  # fmt: skip

    def full_gradients(self) -> dict[str, Tensor]:
        """Whole gradients on the CPU of rank 0, by parameter name; {} elsewhere.

        A parameter that took no part in the loss has a gradient of zeros.
        """
        gradients = {
            p.name: torch.zeros_like(value) if value.grad is None else value.grad
            for p in self.stored
            if p.requires_grad and (value := self.shards[p.name]) is not None
        }
        trained = [p for p in self.stored if p.requires_grad]
        whole = state.full_state_dict(
            trained, gradients, self._sizes(), self._coordinate, self._groups
        )
        return {name: whole[name] for name in gradients if name in whole}  # a tied one once

    def state_dict(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """`DTensor`s under every key of the model's own state dict."""
        return state_dict(self.stored, self.shards, self._device_mesh(), self.constant_buffers)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Take values from whole tensors or `DTensor`s, under the model's own names."""
        return state.load_state_dict(
            self.stored, self.shards, state_dict, self._sizes(), self._coordinate,
            self.constant_buffers, strict,
        )  # fmt: skip

    def _sizes(self) -> tuple[int, ...]:
        return tuple(self.plan.data.axes.values())

    def _device_mesh(self) -> DeviceMesh | None:
        if not dist.is_initialized() or self._mesh.n_ranks == 1:
            return None
        axes = self.plan.data.axes
        if self._dtensor_mesh is None:
            self._dtensor_mesh = init_device_mesh(
                self._device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)
            )
        return self._dtensor_mesh


@dataclass(frozen=True)
class _Like:
    """Something with a shape."""

    shape: tuple[int, ...]


def _signature(tensors: Mapping[str, Any], static: Mapping[str, Any]) -> Signature:
    shapes = {path: tuple(value.shape) for path, value in tensors.items()}
    return tuple(sorted((shapes | {k: repr(v) for k, v in static.items()}).items()))


def _taken(stage: StageProgram, constant: str) -> bool:
    return any(item.source == constant for item in stage.delivered)
