"""A sharded step on thread ranks, compared with one process (`thread_errors`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autopar.codegen import file_name
from autopar.parity.alone import StepResult, gradients_of
from autopar.parity.report import relative_error
from autopar.passes.facts import Target
from autopar.placement import TensorType, gather
from autopar.planning import Plan
from autopar.runtime.execute import Environment, Executor, load_code
from autopar.runtime.launch import ThreadWorld, run_threads
from autopar.runtime.tensors import extended, local_shard

CPU = torch.device("cpu")
# How long ranks wait for one that runs, and for one that may compile its regions first.
TURN_S, COMPILING_TURN_S = 60.0, 1800.0


def thread_errors(
    plan: Plan,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    wanted: StepResult,
    device: torch.device = CPU,
) -> dict[str, float]:
    """The errors of one step of `plan`, on ranks that are threads of this process.

    They run the generated program, all on one `device`. Errors are the worst of all ranks.
    """
    assert plan.bound is not None
    pipeline, program = plan.bound.pipeline, plan.bound.analysis.program
    files = plan.bound.sources_on(device.type)
    names = enumerate(map(file_name, range(pipeline.n_stages)))
    codes = {k: load_code(name, files[name])[0] for k, name in names}
    constants = {k: make() for k, make in program.constants.items()}
    given = {n: inputs[info.path] for n, info in program.inputs.items()}

    def run(world: ThreadWorld) -> StepResult:
        device_of_rank = pipeline.device_of(world.rank)
        mesh = pipeline.device_meshes[device_of_rank]
        coordinate = mesh.coordinate(world.rank)
        groups = [world.make_groups(m) for m in pipeline.device_meshes][device_of_rank]
        stored = {
            p.name: local_shard(parameters[p.mirror_of or p.name], p, mesh.sizes, coordinate)
            .to(device)
            .requires_grad_(p.requires_grad)
            for k in pipeline.stages_of(world.rank)
            for p in pipeline.stages[k].parameters
        }
        environment = Environment(
            device, groups, world.messenger(rendezvous=True), world.world_group()
        )
        held = {name: value.clone().to(device) for name, value in buffers.items()}
        executor = Executor(pipeline, world.rank, codes, environment, constants, held)
        loss = executor.step(stored, given)
        return StepResult(loss.cpu(), _on_cpu(gradients_of(stored)), _on_cpu(held))

    compiles = plan.bound.compilation[Target].options.compiles
    timeout_s = COMPILING_TURN_S if compiles else TURN_S
    results = run_threads(run, pipeline.n_ranks, timeout_s=timeout_s)
    errors = {"loss": max(relative_error(found.loss, wanted.loss) for found in results)}
    for stage, mesh in zip(pipeline.stages, pipeline.meshes, strict=True):
        for p in stage.parameters:
            if not p.requires_grad:
                continue
            tensor = TensorType(p.dims, p.stored.dtype.itemsize, True)
            locals_ = [results[rank].gradients[p.name] for rank in mesh.ranks]
            whole, spread = gather(locals_, tensor, p.stored.spec, mesh.sizes)
            expected = extended(wanted.gradients[p.mirror_of or p.name], p)
            error = max(relative_error(whole, expected), spread)
            errors[p.name] = max(error, errors.get(p.name, 0.0))
        for b in stage.changed:
            found = [results[rank].buffers[b.name] for rank in mesh.ranks]
            errors[b.name] = max(relative_error(value, wanted.buffers[b.name]) for value in found)
    return errors


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}
