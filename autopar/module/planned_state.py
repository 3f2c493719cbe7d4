"""What a rank has of a module once there is a plan: shards, programs, and what is watched."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.module.agreement import Hyperparameters, agreed_values, fingerprints
from autopar.module.batches import LocalRows
from autopar.module.finite import FiniteCheck
from autopar.module.job import from_rank_0, own_rank
from autopar.module.layers import Holders, Modes
from autopar.module.optimizers import warn_of_none
from autopar.module.originals import ConstantBuffers, Originals
from autopar.module.parameters import gathered_names, make_parameters, shards
from autopar.module.programs import Links, Programs
from autopar.operators import Stream
from autopar.options import Options
from autopar.passes.binding import planned_row_dims
from autopar.passes.compilation import Compilation
from autopar.passes.facts import Source, Target
from autopar.planning import Bound, Plan
from autopar.plans import PlanData
from autopar.program.graph import Program
from autopar.program.lines import Pipeline
from autopar.runtime.state import (
    LossScaler,
    StageState,
    all_names,
    changed_buffers,
    constant_buffers,
    everyone,
    initial_buffers,
    initial_shards,
    stage_device_mesh,
    stage_group,
)

_NUMBERS = itertools.count()  # of the modules that this process made


@dataclass(frozen=True)
class Stored:
    """What a rank stores.

    parameters    name -> this rank's parameter (`runtime/tensors`)
    buffers       name -> buffer: constants, and those that steps of this stage change
    not_saved     names of buffers that state dicts leave out
    """

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    not_saved: frozenset[str]

    @staticmethod
    def initial(
        place: StageState, model: nn.Module, program: Program, options: Options, weights: str
    ) -> Stored:
        """The model's values, on the device of `place`. Every rank must call it."""
        changed = changed_buffers(place, model)
        held = initial_shards(place, weights, model, buffers=changed)
        names = {
            name for info in program.parameters.values() for name in (info.name, *info.aliases)
        }
        parameters = make_parameters(place, held, gathered_names(options.optimizer_gather, names))
        warn_of_none(parameters.values(), place.stages, place.pipeline.n_stages)
        persistent = initial_buffers(model, torch.device("cpu"))
        constants = constant_buffers(persistent, place.changed_anywhere)
        buffers = agreed_values(constants, weights, place.device)
        for buffer in place.changed:
            buffers |= dict.fromkeys(all_names(buffer), changed[buffer.name])
        not_saved = {n for b in place.changed if not b.persistent for n in all_names(b)}
        return Stored(parameters, buffers, frozenset(not_saved))


@dataclass(eq=False)
class PlannedState:
    """One rank's part of a module that has a plan.

    place            this rank's place in the pipeline
    stored           its parameters and buffers
    programs         what is compiled for which batch
    stream           the module's random numbers
    seed             torch's, as last seen
    hyperparameters  of optimizers: compared between ranks
    finite           what is known of the losses
    originals        the model that was given
    modes            the training modes of its layers at capture
    constants        buffers that no step changes
    scaler           with float16
    layers, holders  of the module: what it shows, and which tensors stand there
    """

    plan: Plan
    place: StageState
    stored: Stored
    programs: Programs
    stream: Stream
    seed: int
    hyperparameters: Hyperparameters
    finite: FiniteCheck
    originals: Originals
    modes: Modes
    constants: ConstantBuffers
    scaler: LossScaler | None = None
    layers: Mapping[str, nn.Module] = field(default_factory=dict)
    holders: Holders | None = None
    _dtensor_mesh: DeviceMesh | None = None

    @staticmethod
    def adopted(
        model: nn.Module, options: Options, weights: str, device: torch.device, data: PlanData,
        compilation: Compilation,
    ) -> PlannedState:  # fmt: skip
        """Place the plan on this rank. Every rank must call it."""
        pipeline, program = compilation[Pipeline], compilation[Program]
        planned, target = compilation[Source].example_inputs, compilation[Target]
        compilation.forget(Source)
        links = Links.join(pipeline, own_rank(), device)
        place = StageState(
            pipeline, links.rank, links.device, links.groups, links.messenger, links.world
        )
        stored = Stored.initial(place, model, program, options, weights)
        originals, bound, seed = Originals(model), Bound(compilation), torch.initial_seed()
        stream = Stream(from_rank_0(lambda: seed))
        programs = Programs(
            model, target, bound, links, stored.buffers,
            frozenset(b.name for b in program.buffers.values()),
            fingerprints(planned, with_content=False), weights,
            from_rank_0(lambda: next(_NUMBERS)), originals.is_written,
        )  # fmt: skip
        programs.add_planned(planned, program)
        return PlannedState(
            Plan(data, bound), place, stored, programs, stream, seed,
            Hyperparameters(stage_group(place), device, options.check_every),
            FiniteCheck(everyone(place), device), originals, Modes(model),
            ConstantBuffers(stored.buffers, place.changed),
        )  # fmt: skip

    @property
    def bound(self) -> Bound:
        return self.programs.bound

    @property
    def shards(self) -> dict[str, Tensor]:
        """Parameter name -> this rank's shard, a plain tensor with the shard of the gradient."""
        return shards(self.stored.parameters)

    @property
    def changed(self) -> dict[str, Tensor]:
        """The buffers that steps change here, by their first names."""
        return {b.name: self.stored.buffers[b.name] for b in self.place.changed}

    @property
    def local_rows(self) -> LocalRows:
        rows = planned_row_dims(self.plan.data)
        return LocalRows(self.bound.analysis.program, self.place, rows)

    @property
    def dtensor_mesh(self) -> DeviceMesh | None:
        """The mesh of this rank's stages, for `DTensor`s; made at the first call, by every rank."""
        if self._dtensor_mesh is None:
            place = self.place
            self._dtensor_mesh = stage_device_mesh(place.pipeline, place.rank, place.device.type)
        return self._dtensor_mesh

    def copied(self, memo: dict[int, Any]) -> PlannedState:
        """With parameters, buffers and random numbers of its own, and the same plan."""
        stored, place = copy.deepcopy(self.stored, memo), self.place
        programs = self.programs.for_buffers(stored.buffers)
        every = programs.target.options.check_every
        return replace(
            self, stored=stored, programs=programs, stream=copy.deepcopy(self.stream, memo),
            hyperparameters=Hyperparameters(stage_group(place), place.device, every),
            finite=FiniteCheck(everyone(place), place.device),
            constants=ConstantBuffers(stored.buffers, place.changed),
        )  # fmt: skip
