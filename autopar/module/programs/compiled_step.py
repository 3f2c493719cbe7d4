"""The compiled programs of one rank: for the planned shapes, for other shapes, and for evaluation.

Each of them is a graph of its own, on which the plan is placed stage by stage. A rank compiles the
generated files of its own stages. All ranks hold the same pipeline.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.codegen import file_name
from autopar.passes.analysis import Analysis
from autopar.passes.compilation import Compilation
from autopar.passes.facts import Sources
from autopar.program.communication import message_edges
from autopar.program.graph import Program
from autopar.program.lines import Pipeline
from autopar.runtime.collectives import DistMessenger, Messenger
from autopar.runtime.execute import Environment, Executor, load_code, tell_when_compiled
from autopar.runtime.groups import Group, make_edges, make_groups, world_group
from autopar.runtime.state import own_rank
from autopar.units import format_seconds

# What a program computes: a step, without or with the model's outputs; without gradients, the
# model's outputs or the loss alone.
Kind = Literal["step", "step with outputs", "forward", "loss"]
TRAINS: tuple[Kind, ...] = ("step", "step with outputs")


@dataclass(frozen=True)
class Links:
    """How this rank communicates: the groups of its mesh, and messages between stages."""

    rank: int
    device: torch.device
    groups: Mapping[tuple[int, ...], Group]
    messenger: Messenger | None
    world: Group | None

    @staticmethod
    def join(pipeline: Pipeline, rank: int, device: torch.device) -> Links:
        """Make the process groups; every rank must call it with the same pipeline.

        Groups of the axes come first, mesh by mesh; then, on GPUs, one per directed edge.
        """
        meshes = pipeline.device_meshes
        groups: Mapping[tuple[int, ...], Group] = {}
        for mesh in meshes:
            made = make_groups(mesh) if dist.is_initialized() else {}
            if rank in mesh.ranks:
                groups = made
        if pipeline.n_stages == 1:
            return Links(rank, device, groups, None, None)
        edges = {} if device.type == "cpu" else make_edges(message_edges(pipeline))
        return Links(rank, device, groups, DistMessenger(device, edges), world_group())

    def environment(self) -> Environment:
        return Environment(self.device, self.groups, self.messenger, self.world)


@dataclass(frozen=True)
class Built:
    """One captured and compiled program, for one mode and one input signature.

    `code_path` is the generated file of the first of this rank's stages.

    `scales` are of the outputs of a microbatch (`microbatch_scales`).
    """

    program: Program
    pipeline: Pipeline
    executor: Executor
    code_path: Path
    scales: tuple[float, ...] = ()

    @staticmethod
    def of(
        compilation: Compilation,
        links: Links,
        buffers: Mapping[str, Tensor],
        scales: tuple[float, ...] = (),
    ) -> Built:
        """Compile this rank's stages. Running them updates the module's `buffers` they change."""
        program, pipeline = compilation[Analysis].program, compilation[Pipeline]
        files, own = compilation[Sources].files, pipeline.stages_of(links.rank)
        loaded = {k: load_code(file_name(k), files[file_name(k)]) for k in own}
        for _, path in loaded.values():
            _tell_of_regions(program.model_name, str(path))
        taken = {item.source for k in own for item in pipeline.stages[k].delivered}
        constants = {name: make() for name, make in program.constants.items() if name in taken}
        codes = {k: code for k, (code, _) in loaded.items()}
        executor = Executor(pipeline, links.rank, codes, links.environment(), constants, buffers)
        return Built(program, pipeline, executor, loaded[own[0]][1], scales)

    def outputs(self, tensors: Sequence[Tensor]) -> Any:
        """The model's output structure of one microbatch, as the model makes it of these rows."""
        return self.program.rebuild(
            [t if s == 1.0 else t * s for t, s in zip(tensors, self.scales, strict=True)]
        )

    def for_buffers(self, links: Links, buffers: Mapping[str, Tensor]) -> Built:
        """The same program, changing other `buffers`."""
        own = self.executor
        executor = Executor(
            own.pipeline, links.rank, own.codes, links.environment(), own.constants, buffers
        )
        return replace(self, executor=executor)


def _tell_of_regions(model: str, file: str) -> None:
    """Say on stderr of rank 0 that a first step compiles, and how long that took."""

    def tell(text: str) -> None:
        print(f"autopar {text} of {model}", file=sys.stderr, flush=True)  # noqa: T201

    def on_end(n_regions: int, time_s: float) -> None:
        tell(f"compiled {n_regions} regions in {format_seconds(time_s)}")

    if own_rank() == 0 and (n_left := tell_when_compiled(file, on_end)):
        tell(f"compiles {n_left} regions in the first step")
