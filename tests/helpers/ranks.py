"""Pipelines on thread ranks, beside one process: what every test that runs a program shares.

The parity law: max|a - b| <= 1e-10 max(1, max|b|), on every rank. The one process is on the CPU.
The ranks share the device that `AUTOPAR_TEST_DEVICE` names (`make test-gpu`: "cuda"), else the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from autopar.capture.reference import change_buffers, reference_step
from autopar.codegen import emit
from autopar.passes.backward import differentiate, make_fusible
from autopar.placement import TensorType, difference, gather
from autopar.precision import lifted_dtype
from autopar.program.graph import Program
from autopar.program.lines import Pipeline
from autopar.runtime.execute import Environment, Executor, delivery, load_code
from autopar.runtime.groups import CollectiveCall, Recorder
from autopar.runtime.launch import ThreadWorld, run_threads

TOLERANCE = 1e-10
DEVICE = torch.device(os.environ.get("AUTOPAR_TEST_DEVICE", "cpu"))
Batch = Mapping[str, Tensor]
T = TypeVar("T")


def pipeline_step(
    program: Program, pipeline: Pipeline, batch: Batch, seed: int
) -> tuple[dict[str, float], list[tuple[CollectiveCall, ...]]]:
    """One step of a pipeline beside one process: errors as in `Step`, and every rank's calls."""
    parameters, buffers = random_parameters(program, seed), random_buffers(program, seed)
    changed = dict(buffers)
    loss, _ = reference_step(program, parameters, batch, changed)
    assert loss is not None
    loss.backward()
    change_buffers(program, parameters, batch, changed, pipeline.n_microbatches - 1)
    inputs = named_inputs(program, batch)

    def work(rank: Rank) -> _Result:
        with Recorder() as recorder:
            found = rank.executor.step(rank.stored, inputs)
        gradients = {name: gradient_of(t) for name, t in rank.stored.items()}
        return _Result(found, gradients, rank.buffers, tuple(recorder.calls))

    results = run_ranks(program, pipeline, parameters, work, buffers)
    errors = {"loss": max(relative_error(r.loss, loss.detach()) for r in results)}
    gradients = {name: gradient_of(p) for name, p in parameters.items()}
    errors |= compare_with(pipeline, [r.gradients for r in results], gradients)
    for stage, mesh in zip(pipeline.stages, pipeline.meshes, strict=True):
        for b in stage.changed:
            found = [results[rank].buffers[b.name] for rank in mesh.ranks]
            errors[b.name] = max(relative_error(value, changed[b.name]) for value in found)
    return errors, [r.calls for r in results]


def wrong_in_step(
    program: Program, pipeline: Pipeline, batch: Batch, seed: int
) -> dict[str, float]:
    """What one step gets wrong beside one process."""
    return above(pipeline_step(program, pipeline, batch, seed)[0])


def above(errors: Mapping[str, float]) -> dict[str, float]:
    """Errors above the tolerance; NaN is one."""
    return {name: error for name, error in errors.items() if not error <= TOLERANCE}


@dataclass(frozen=True)
class _Result:
    """What a step gave one rank."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    calls: tuple[CollectiveCall, ...]


@dataclass(frozen=True)
class Rank:
    """One thread rank of a pipeline, its parameters and buffers in place."""

    executor: Executor
    stored: dict[str, Tensor]
    buffers: dict[str, Tensor]
    world: ThreadWorld


def run_ranks(
    program: Program,
    pipeline: Pipeline,
    parameters: Mapping[str, Tensor],
    work: Callable[[Rank], T],
    buffers: Mapping[str, Tensor] | None = None,
) -> list[T]:
    """`work` on every rank: the stages emitted, `parameters` dealt out, copies of `buffers`."""
    n_stages = pipeline.n_stages
    codes = {}
    for k, stage in enumerate(pipeline.stages):
        joint = differentiate(stage, DEVICE.type)
        joint = make_fusible(joint) if stage.is_compiled else joint
        codes[k] = load_code(f"stage_{k}.py", emit(joint, k, n_stages))[0]
    constants = {name: compute() for name, compute in program.constants.items()}

    def run(world: ThreadWorld) -> T:
        device = pipeline.device_of(world.rank)
        # Groups of all meshes, in the same order on all ranks, as processes must make them.
        groups = [world.make_groups(mesh) for mesh in pipeline.device_meshes][device]
        mesh = pipeline.device_meshes[device]
        at = mesh.coordinate(world.rank)
        stored = {}
        for p in (p for k in pipeline.stages_of(world.rank) for p in pipeline.stages[k].parameters):
            whole = parameters[p.mirror_of or p.name].detach()
            part = delivery.shard(whole, p.dims, p.stored.spec, mesh.sizes, at).clone()
            stored[p.name] = part.to(DEVICE).requires_grad_(p.requires_grad)
        environment = Environment(
            DEVICE, groups, world.messenger(rendezvous=True), world.world_group()
        )
        held = {name: value.clone().to(DEVICE) for name, value in (buffers or {}).items()}
        executor = Executor(pipeline, world.rank, codes, environment, constants, held)
        return work(Rank(executor, stored, held, world))

    return run_threads(run, pipeline.n_ranks)


def compare_with(
    pipeline: Pipeline, found: Sequence[Mapping[str, Tensor]], expected: Mapping[str, Tensor]
) -> dict[str, float]:
    """Errors of every rank's parameters or gradients; `expected` is whole, by owner's name.

    Ranks that should agree and do not are an error too.
    """
    errors = {}
    for k, (stage, mesh) in enumerate(zip(pipeline.stages, pipeline.meshes, strict=True)):
        for p in stage.parameters:
            parts = [found[rank][p.name].cpu() for rank in mesh.ranks]
            tensor = TensorType(p.dims, 8, True)
            whole, spread = gather(parts, tensor, p.stored.spec, mesh.sizes)
            key = p.name if pipeline.n_stages == 1 else f"stage {k}: {p.name}"
            errors[key] = max(relative_error(whole, expected[p.mirror_of or p.name]), spread)
    return errors


def named_inputs(program: Program, batch: Batch) -> dict[str, Tensor]:
    """A batch by placeholder names."""
    return {name: batch[info.path] for name, info in program.inputs.items()}


def random_parameters(program: Program, seed: int) -> dict[str, Tensor]:
    """Whole parameters by name."""
    generator = torch.Generator().manual_seed(seed)
    return {
        p.name: (
            torch.randn(p.shape, dtype=lifted_dtype(p.dtype), generator=generator) * 0.3
        ).requires_grad_(p.requires_grad)
        for p in program.parameters.values()
    }


def random_buffers(program: Program, seed: int) -> dict[str, Tensor]:
    """What changed buffers hold at first, by name; positive, as variances are."""
    generator = torch.Generator().manual_seed(seed)
    return {
        b.name: (torch.rand(b.shape, generator=generator, dtype=torch.float64) + 0.5).to(b.dtype)
        for b in program.buffers.values()
    }


def gradient_of(parameter: Tensor) -> Tensor:
    """A parameter that nothing depends on has gradient 0."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """By the parity law."""
    return difference(actual.cpu(), expected) / max(1.0, expected.abs().max().item())
