"""Verification for users: one sharded step against the same step on one process.

    captured program on one process   ==  the model itself        (tracing is right)
    sharded program on all ranks      ==  captured program        (sharding is right)

`verify` checks the second line. Errors are max|a - b| / max(1, max|b|) (`relative_error`), of the
loss, of every gradient and of every buffer that the step changes, on every rank. In a torchrun or
`autopar.launch` job the ranks are its processes. Elsewhere they are threads of this process, which
run the same generated program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.api import parallelize
from autopar.capture import change_buffers, microbatch_inputs, reference_step, whole_buffers
from autopar.errors import VerificationError
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.binding import capture_step
from autopar.placement import TensorType, gather
from autopar.planning import Plan, plan_program
from autopar.program import Program, flatten_inputs
from autopar.runtime.execute import Environment, Executor, load_code
from autopar.runtime.launch import ThreadWorld, run_threads
from autopar.runtime.tensors import extended, local_shard

# In float64 only a wrong program differs; in the model's own dtypes casts and sums round.
TOLERANCE = {"fp64": 1e-10, "model": 1e-6}


class StepResult(NamedTuple):
    """The results of one step; gradients and buffers by name."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class Report:
    """Errors by name, and the tolerance; the loss is named `loss`."""

    errors: Mapping[str, float]
    tolerance: float
    plan: Plan

    @property
    def ok(self) -> bool:
        return all(error <= self.tolerance for error in self.errors.values())

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=0.0)

    def text(self) -> str:
        """One line for all values, and one for each that exceeds the tolerance."""
        verdict = "equal" if self.ok else "NOT equal"
        lines = [
            f"{verdict}: worst error {self.worst:.2e} of {len(self.errors)} values, "
            f"tolerance {self.tolerance:.0e}"
        ]
        for name, error in self.errors.items():
            if not error <= self.tolerance:
                lines.append(f"  {name}: {error:.2e}")
        return "\n".join(lines)

    def raise_if_wrong(self) -> None:
        """Raise `VerificationError` unless `ok`."""
        if not self.ok:
            raise VerificationError(self.text())


def relative_error(value: Tensor, wanted: Tensor) -> float:
    """max|a - b| / max(1, max|b|); infinite for anything that is not finite."""
    if value.numel() == 0:
        return 0.0
    error = (value.double() - wanted.double()).abs().max().item()
    scale = max(1.0, wanted.double().abs().max().item())
    return error / scale if error == error else float("inf")


def verify(
    model: nn.Module, mesh: Any, example_inputs: Mapping[str, Any] | Sequence[Any], **options: Any
) -> Report:
    """Run one sharded step of `model`; compare loss, gradients and buffers with one process.

    Options are those of `plan`; with `precision="fp64"` the tolerance is 1e-10. The inputs must be
    real tensors. In a job, every rank must call it, and every rank gets the report.
    """
    checked = Options.of(**options)
    tolerance = TOLERANCE.get(checked.precision, TOLERANCE["model"])
    program = capture_step(model, example_inputs, checked)
    inputs = {k: v for k, v in flatten_inputs(example_inputs).items() if isinstance(v, Tensor)}
    if dist.is_initialized():
        return _verify_in_job(model, mesh, program, example_inputs, inputs, tolerance, options)
    plan = plan_program(program, Mesh.of(mesh), example_inputs, checked)
    parameters, buffers = whole_parameters(program, model), whole_buffers(program, model)
    wanted = reference(program, parameters, inputs, buffers, plan.data.microbatches)
    return Report(_thread_errors(plan, parameters, buffers, inputs, wanted), tolerance, plan)


def whole_parameters(program: Program, model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters in the program's dtypes; random values for a model on meta."""
    named = dict(model.named_parameters(remove_duplicate=False))
    generator = torch.Generator().manual_seed(0)
    out = {}
    for info in program.parameters.values():
        value = named[info.name].detach()
        if value.is_meta:
            value = torch.randn(info.shape, generator=generator) * 0.02
        out[info.name] = value.to("cpu", info.dtype).clone().requires_grad_(info.requires_grad)
    return out


def reference(
    program: Program,
    parameters: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    n_microbatches: int = 1,
    seed: int = 0,
) -> StepResult:
    """A step of the captured program on one process, starting from `buffers`."""
    changed = dict(buffers)
    total = torch.zeros(())
    for rows, of_rows in microbatch_inputs(program, inputs, seed):
        loss, _ = reference_step(program, parameters, rows, changed, of_rows)
        assert loss is not None
        loss.backward()
        total = total + loss.detach()
    if program.accumulation is None:
        change_buffers(program, parameters, inputs, changed, n_microbatches - 1)
    return StepResult(total, _gradients(parameters), changed)


def _gradients(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: p.grad if p.grad is not None else torch.zeros_like(p)
        for name, p in parameters.items()
    }


def _thread_errors(
    plan: Plan,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    wanted: StepResult,
) -> dict[str, float]:
    assert plan.bound is not None
    pipeline, program = plan.bound.pipeline, plan.bound.analysis.program
    codes = [load_code(name, source)[0] for name, source in plan.code().items()]
    constants = {k: make() for k, make in program.constants.items()}
    given = {n: inputs[info.path] for n, info in program.inputs.items()}

    def run(world: ThreadWorld) -> StepResult:
        k = pipeline.stage_of(world.rank)
        mesh = pipeline.meshes[k]
        coordinate = mesh.coordinate(world.rank)
        groups = [world.make_groups(m) for m in pipeline.meshes][k]
        stored = {
            p.name: local_shard(
                parameters[p.mirror_of or p.name], p, mesh.sizes, coordinate
            ).requires_grad_(p.requires_grad)
            for p in pipeline.stages[k].parameters
        }
        environment = Environment(
            torch.device("cpu"), groups, world.messenger(rendezvous=True), world.world_group()
        )
        held = {name: value.clone() for name, value in buffers.items()}
        executor = Executor(pipeline, world.rank, codes[k], environment, constants, held)
        return StepResult(executor.step(stored, given), _gradients(stored), held)

    results = run_threads(run, pipeline.n_ranks)
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


def _verify_in_job(
    model: nn.Module,
    mesh: Any,
    program: Program,
    example_inputs: Mapping[str, Any] | Sequence[Any],
    inputs: Mapping[str, Tensor],
    tolerance: float,
    options: Mapping[str, Any],
) -> Report:
    module = parallelize(model, mesh, example_inputs, **options)
    batch, seed, before = example_inputs, module.stream.seed, module.full_state_dict()
    loss = module.step(**batch) if isinstance(batch, Mapping) else module.step(*batch)
    values = module.full_state_dict()
    gradients = module.full_gradients()
    errors: dict[str, float] = {}
    if dist.get_rank() == 0:
        parameters = {
            info.name: values[info.name].to(info.dtype).requires_grad_(info.requires_grad)
            for info in program.parameters.values()
        }
        buffers = whole_buffers(program, model)
        buffers |= {name: before[name] for name in buffers.keys() & before.keys()}
        n_microbatches = module.plan.data.microbatches
        wanted = reference(program, parameters, inputs, buffers, n_microbatches, seed)
        errors["loss"] = relative_error(loss.cpu(), wanted.loss)
        for name, gradient in gradients.items():
            errors[name] = relative_error(gradient, wanted.gradients[name])
        for name in buffers.keys() & values.keys():
            errors[name] = relative_error(values[name], wanted.buffers[name])
    box = [errors]
    dist.broadcast_object_list(box, src=0)
    return Report(box[0], tolerance, module.plan)
