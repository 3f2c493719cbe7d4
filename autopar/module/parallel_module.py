"""The parallel module: the `nn.Module` that `autopar.parallelize` returns.

Every rank captures the graph, and rank 0 plans. The other ranks take rank 0's plan as data, check
the hash of their graph and place the plan on it. Parameters are the stored shards, under the user's
names. Every other input shape, and evaluation, is a program of its own over the same shards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture import capture
from autopar.errors import BatchError, NotPlannedError, NotSupportedError, OptionError
from autopar.mesh import Mesh
from autopar.module.compiled_step import Built, Links
from autopar.module.habits import PlannedModule, StepLoss, keep_from_dynamo
from autopar.module.job import from_rank_0, join_process_group, own_rank
from autopar.module.optimizers import watch_optimizers
from autopar.module.parameters import StepGradients, gathered_names, make_parameters, shards
from autopar.operators import Stream
from autopar.options import Options
from autopar.passes.binding import check_mesh, example_of, has_nested_inputs, planned_accumulation
from autopar.passes.compilation import Compilation
from autopar.passes.facts import EvaluationStages, Placed, Source, Target, Trained
from autopar.passes.pipeline import EVALUATION, PASSES, other_shapes
from autopar.planning import Bound, Plan, settled_heap
from autopar.plans import PlanData
from autopar.program import Audit, Delivered, Pipeline, Program, batch_shards, flatten_inputs
from autopar.runtime import state
from autopar.runtime.execute import batch_index
from autopar.runtime.state import (
    StageState,
    all_names,
    changed_buffers,
    constant_buffers,
    initial_buffers,
    initial_shards,
    stage_device_mesh,
    state_dict,
)

Signature = tuple[tuple[str, Any], ...]


class ParallelModule(PlannedModule):
    """A model sharded by a plan. Make it with `autopar.parallelize`."""

    def __init__(self, model: nn.Module, mesh: Mesh, options: Options, weights: str) -> None:
        super().__init__()
        self._model = (model,)  # a tuple, so that it is not a submodule
        self._mesh, self._options, self._weights = mesh, options, weights
        self._device = join_process_group(mesh)
        self._plan: Plan | None = None
        self._dtensor_mesh: DeviceMesh | None = None
        self._built: dict[tuple[bool, bool, Signature], Built] = {}
        self._live_buffers: frozenset[str] = frozenset()
        self.training = model.training

    @property
    def code_path(self) -> Path:
        """The generated file of this rank's stage of the planned program."""
        _ = self.plan
        return next(iter(self._built.values())).code_path

    @property
    def plan(self) -> Plan:
        """The plan; raises `NotPlannedError` before there is one."""
        if self._plan is None:
            raise NotPlannedError(
                "there is no plan yet: no example_inputs and no plan were given",
                hint="call pm.prepare(**batch), or pm.step(**batch) once",
            )
        return self._plan

    def captured(self) -> Audit:
        """What capture made of the model, for training: frozen, kept, replaced, refused."""
        return self._bound.analysis.program.audit

    def prepare(self, *args: Any, **kwargs: Any) -> ParallelModule:
        """Plan for a batch like this one, unless there is a plan. Returns self."""
        if self._plan is None:
            self._make_plan(args if args else kwargs)
        return self

    def _make_plan(self, batch: Mapping[str, Any] | Sequence[Any]) -> None:
        compilation = self._compilation(batch)
        _ = compilation[Program]  # on every rank, so that each reports its own trace error

        @settled_heap()
        def on_rank_0() -> PlanData:
            return compilation[PlanData]

        self._adopt(from_rank_0(on_rank_0), compilation)

    def _use_plan(self, plan: Plan, batch: Mapping[str, Any] | Sequence[Any] | None = None) -> None:
        """Use rank 0's plan; `batch` is needed if the plan has nested inputs."""
        data = from_rank_0(lambda: plan.data)
        check_mesh(data, self._mesh)
        example = batch if has_nested_inputs(data) and batch is not None else example_of(data)
        self._adopt(data, self._compilation(example))

    def _compilation(self, batch: Mapping[str, Any] | Sequence[Any]) -> Compilation:
        source, target = Source(self._model[0], batch), Target(self._mesh, self._options)
        return Compilation(PASSES, source, target)

    def _adopt(self, data: PlanData, compilation: Compilation) -> None:
        """Adopt rank 0's plan: rank 0 keeps its facts, the others place the plan."""
        if PlanData not in compilation:
            compilation.give(data)
        pipeline, program = compilation[Pipeline], compilation[Program]
        compilation.forget(Source)
        self._links = links = Links.join(pipeline.meshes, own_rank(), self._device)
        self._place = StageState(
            pipeline, links.rank, links.device, links.groups, links.messenger, links.world
        )
        self._adopt_state(program)
        keep_from_dynamo(type(self))
        self.stream = Stream(from_rank_0(torch.initial_seed))
        self._plan = Plan(data, Bound(compilation))
        signature = _signature({i.path: _Like(i.shape) for i in data.inputs}, data.static_inputs)
        self._built[True, False, signature] = Built.of(compilation, links, self._held_buffers)

    def _adopt_state(self, program: Program) -> None:
        """Set the shards, the buffers that steps change here, and the constant buffers."""
        model, place = self._model[0], self._place
        changed = changed_buffers(place, model)
        held = initial_shards(place, self._weights, model, buffers=changed)
        names = {
            name for info in program.parameters.values() for name in (info.name, *info.aliases)
        }
        gathered = gathered_names(self._options.optimizer_gather, names)
        self._parameters |= make_parameters(place, held, gathered)
        watch_optimizers(model)
        self._live_buffers = frozenset(b.name for b in program.buffers.values())
        persistent = initial_buffers(model, torch.device("cpu"))
        self._buffers |= constant_buffers(persistent, place.changed_anywhere)
        for buffer in place.changed:
            self._buffers |= dict.fromkeys(all_names(buffer), changed[buffer.name])
            if not buffer.persistent:
                self._non_persistent_buffers_set |= {*all_names(buffer)}

    def _capture(self, batch: Mapping[str, Any] | Sequence[Any]) -> Program:
        """The graph of the current mode, for another batch or for evaluation."""
        training, data = self.training, self.plan.data
        program = capture(
            self._model[0], batch, training=training, precision=self._options.precision,
            loss_fn=self._options.loss_fn if training else None, live_buffers=self._live_buffers,
            accumulation=planned_accumulation(data, batch) if training else None,
        )  # fmt: skip
        for buffer in program.buffers.values():
            if buffer.name not in self._live_buffers:
                raise NotSupportedError(
                    f"buffer `{buffer.name}` changes here, and not in the step that was planned",
                    hint="change it in every mode and for all shapes, or never",
                )
        return program

    def _program(self, batch: Mapping[str, Any] | Sequence[Any], with_outputs: bool) -> Built:
        """The compiled program for the current mode and these shapes."""
        leaves = flatten_inputs(batch)
        tensors = {k: v for k, v in leaves.items() if isinstance(v, Tensor)}
        signature = _signature(tensors, {k: v for k, v in leaves.items() if k not in tensors})
        key = (self.training, with_outputs, signature)
        if key not in self._built:
            compilation = self._compilation_of_plan(self._capture(batch), with_outputs)
            self._built[key] = Built.of(compilation, self._links, self._held_buffers)
        return self._built[key]

    def _compilation_of_plan(self, program: Program, with_outputs: bool) -> Compilation:
        """The plan placed on another program: other shapes, with outputs, or evaluation."""
        bound = self._bound
        given = Target(self._mesh, self._options), bound.data, program
        if self.training:
            return Compilation(other_shapes(bound.pipeline.n_blocks, with_outputs), *given)
        trained = Trained(Placed(bound.stages), bound.pipeline)
        compilation = Compilation(EVALUATION, *given, trained)
        stages = from_rank_0(lambda: compilation[EvaluationStages])
        if EvaluationStages not in compilation:
            compilation.give(stages)
        return compilation

    @property
    def _bound(self) -> Bound:
        bound = self.plan.bound
        assert bound is not None
        return bound

    def step(
        self,
        *args: Any,
        batch: str = "global",
        outputs: Callable[[Any], None] | None = None,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> Tensor:
        """Run forward and backward of every microbatch; gradients are synchronised on return.

        Inputs are the global batch, the same on every rank; with `batch="local"`, only the rows of
        `local_slice`. `outputs` is called with the outputs of each microbatch, in the model's own
        structure. `weight` multiplies the gradients: 1 / n for one of n batches that share an
        optimizer step. Returns the loss: detached, 0-d, the same on every rank, without the weight.
        Gradients are added to `.grad`. Dropout masks are new at each call, the same for every plan.

        Raises `BatchError` if the batch does not divide.
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
        local = batch == "local"
        if local and self.plan.data.accumulates:
            raise NotSupportedError(
                "a local batch of microbatches that are parts of the whole batch",
                hint="pass the global batch, or plan with microbatches=1",
            )
        self._inputs(self._bound.analysis.program, given, local)  # raises before the capture fails
        whole = self._globalised(given) if local else given
        built = self._program(whole, outputs is not None)
        on_outputs = None
        if outputs is not None:
            rebuild, handler = built.program.rebuild, outputs
            on_outputs = lambda tensors: handler(rebuild(tensors))  # noqa: E731
        inputs = self._inputs(built.program, given, local)
        gradients = StepGradients(self._parameters, self.plan.data.accumulates)
        seed = self.stream.seed
        loss = built.executor.step(gradients.before(), inputs, local, on_outputs, seed, weight)
        self.stream.n_steps += 1
        gradients.after()
        return loss.as_subclass(StepLoss)

    def forward(self, *args: Any, gather: str = "last", **kwargs: Any) -> Any:
        """The model's own output for a global batch, without gradients.

        The loss is on every rank. Other tensors are whole on the ranks of the last stage;
        `gather="all"` gives them to all ranks.
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
        inputs = self._inputs(built.program, given)
        everywhere, seed = gather == "all", self.stream.seed
        loss, *tensors = built.executor.forward(self.shards, inputs, False, everywhere, seed)
        names = built.program.outputs
        return built.program.rebuild(
            [loss if n == built.program.loss else t for n, t in zip(names, tensors, strict=True)]
        )

    def _inputs(
        self, program: Program, given: Mapping[str, Any] | Sequence[Any], is_local: bool = False
    ) -> dict[str, Tensor]:
        """Inputs by placeholder; a local batch may lack what this stage does not read."""
        leaves = flatten_inputs(given)
        wanted = {n: i for n, i in program.inputs.items() if not is_local or self._takes(n)}
        missing = [i.path for i in wanted.values() if i.path not in leaves]
        if missing:
            raise BatchError(f"the batch lacks {missing}; it has {sorted(leaves)}")
        return {n: leaves[i.path] for n, i in program.inputs.items() if i.path in leaves}

    def _takes(self, placeholder: str) -> bool:
        stage = self._place.pipeline.stages[self._place.stage]
        return placeholder in stage.prologue_inputs or bool(self._delivered(placeholder))

    def _delivered(self, placeholder: str) -> list[Delivered]:
        stage = self._place.pipeline.stages[self._place.stage]
        return [d for d in stage.delivered if d.source == placeholder]

    def local_slice(self, name: str) -> slice | None:
        """The rows of input `name` that this rank reads; None if it reads none.

        Raises `OptionError` if there is no such input.
        """
        program = self._bound.analysis.program
        paths = {info.path: placeholder for placeholder, info in program.inputs.items()}
        if name not in paths:
            raise OptionError(f"there is no input {name!r}; inputs are {sorted(paths)}")
        items, sizes = self._delivered(paths[name]), self._place.sizes
        if not self._takes(paths[name]):
            return None
        accumulation = program.accumulation
        shape = program.inputs[paths[name]].shape
        n_rows = (shape[0] if shape else 1) * (accumulation.n if accumulation else 1)
        if accumulation is not None:
            return slice(0, n_rows)
        counts = {batch_shards(d, sizes) for d in items}
        if counts in (set(), {1}) or len(counts) > 1:
            return slice(0, n_rows)
        (n_shards,) = counts
        index = batch_index(items[0], sizes, self._place.coordinate)
        return slice(index * n_rows // n_shards, (index + 1) * n_rows // n_shards)

    def _globalised(
        self, given: Mapping[str, Any] | Sequence[Any]
    ) -> Mapping[str, Any] | Sequence[Any]:
        """Meta tensors with the global shapes of a local batch."""
        program, sizes = self._bound.analysis.program, self._place.sizes
        whole: dict[str, Any] = dict(flatten_inputs(given))
        for placeholder, info in program.inputs.items():
            value = whole.get(info.path)
            items = [d for d in self._delivered(placeholder) if d.batch_cell]
            if value is None:  # another stage's, but the graph needs its shape
                whole[info.path] = torch.empty(info.shape, dtype=info.dtype, device="meta")
                continue
            if not isinstance(value, Tensor) or len({batch_shards(d, sizes) for d in items}) != 1:
                continue
            assert items[0].batch_cell is not None
            shape = list(value.shape)
            shape[items[0].batch_cell[0]] *= batch_shards(items[0], sizes)
            whole[info.path] = torch.empty(shape, dtype=value.dtype, device="meta")
        if isinstance(given, Mapping):
            return whole
        return tuple(whole[str(i)] for i in range(len(whole)))

    @property
    def shards(self) -> dict[str, Tensor]:
        """Parameter name -> this rank's shard, a plain tensor with the shard of the gradient."""
        return shards(self._parameters)

    @property
    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Parameter name -> parameter, of this rank's stage."""
        return {name: p for name, p in self._parameters.items() if p is not None}

    @property
    def persistent_buffers(self) -> dict[str, Tensor]:
        """Name -> buffer, of the buffers on this rank that state dicts have."""
        return {
            n: b for n, b in self._held_buffers.items() if n not in self._non_persistent_buffers_set
        }

    @property
    def _held_buffers(self) -> dict[str, Tensor]:
        return {name: b for name, b in self._buffers.items() if b is not None}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stage, under the user's names (`runtime/tensors`).

        Each has the shape of the whole tensor; this rank keeps a shard of it. Raises
        `NotPlannedError` before a plan.
        """
        _ = self.plan
        yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The model's buffers on this rank: persistent constants, and what its stage changes.

        Raises `NotPlannedError` before a plan.
        """
        _ = self.plan
        yield from super().named_buffers(prefix, recurse, remove_duplicate)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip gradients to norm `max_norm` over all shards; returns the norm before."""
        return state.clip_grad_norm_(self._placed, self.shards, max_norm, norm_type)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole tensors on rank 0's CPU, under the model's own names; {} on other ranks."""
        return state.full_state_dict(self._placed, self.shards, self.persistent_buffers)

    def full_gradients(self) -> dict[str, Tensor]:
        """Whole gradients on rank 0's CPU, by parameter name; {} on other ranks.

        A parameter that does not affect the loss has a gradient of zeros.
        """
        return state.full_gradients(self._placed, self.shards)

    def state_dict(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """`DTensor`s of this rank's stage, under the model's own names.

        Raises `NotSupportedError` for a module that contains this one: its file would have one
        rank's shards.
        """
        if kwargs.get("destination") is not None or args:
            raise NotSupportedError(
                "state_dict of a module that contains a parallel module",
                hint="autopar.save(pm, optimizer, path) for a checkpoint; "
                "pm.full_state_dict() has whole tensors on rank 0",
            )
        place = self._placed
        if self._dtensor_mesh is None:
            self._dtensor_mesh = stage_device_mesh(place.pipeline, place.rank, self._device.type)
        return state_dict(place, self.shards, self._dtensor_mesh, self.persistent_buffers)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load values from whole tensors or `DTensor`s, under the model's own names."""
        return state.load_state_dict(
            self._placed, self.shards, state_dict, self.persistent_buffers, strict
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A module with parameters, buffers and random numbers of its own, and the same plan."""
        _ = self.plan
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        shared = {"_parameters", "_buffers", "_built", "stream"}
        for name, value in self.__dict__.items():
            if name not in shared:  # containers (hooks, ...) are own, what they hold is shared
                is_container = isinstance(value, (dict, set))
                twin.__dict__[name] = copy.copy(value) if is_container else value
        for name in ("_parameters", "_buffers", "stream"):
            twin.__dict__[name] = copy.deepcopy(self.__dict__[name], memo)
        twin._built = {
            key: built.for_buffers(self._links, twin._held_buffers)
            for key, built in self._built.items()
        }
        return twin

    @property
    def _placed(self) -> StageState:
        """This rank's place in the pipeline; raises `NotPlannedError` before a plan."""
        _ = self.plan
        return self._place


@dataclass(frozen=True)
class _Like:
    """Something with a shape."""

    shape: tuple[int, ...]


def _signature(tensors: Mapping[str, Any], static: Mapping[str, Any]) -> Signature:
    shapes = {path: tuple(value.shape) for path, value in tensors.items()}
    return tuple(sorted((shapes | {k: repr(v) for k, v in static.items()}).items()))
