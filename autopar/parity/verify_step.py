"""`verify`: a sharded step, a captured step and a step of the user's module, compared.

In a torchrun or `autopar.launch` job the ranks are its processes. Elsewhere they are threads of
this process, which run the same generated program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.api import parallelize
from autopar.capture import whole_buffers
from autopar.errors import AutoparError, BatchError, OptionError, VerificationError
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.parity.alone import reference, whole_parameters
from autopar.parity.captured import CaptureCheck, compare_capture, tolerance_of
from autopar.parity.report import Report, relative_error
from autopar.parity.sharded import CPU, thread_errors
from autopar.passes.binding import capture_step
from autopar.planning import MeshLike, Plan, PlanOptions, on_program, plan_program
from autopar.precision import Precision, widened
from autopar.program.graph import Program, flatten_inputs
from autopar.runtime.execute import lacking, require_compiler

# In float64 only a wrong program differs; in the model's own dtypes casts and sums round.
TOLERANCE = {"fp64": 1e-10, "model": 1e-6}
IN_FLOAT64 = TOLERANCE["fp64"]


@torch.enable_grad()
def verify(
    model: nn.Module,
    mesh: MeshLike,
    example_inputs: Mapping[str, Any] | Sequence[Any],
    **options: Unpack[PlanOptions],
) -> Report:
    """Run one sharded step of `model`; compare loss, gradients and buffers with one process.

    The sharded step is compared with the captured program, and the captured program, in the model's
    own dtypes, with `model` itself: eager, in its mode, with its hooks, on a copy. So the report
    says which of sharding and capture is wrong.

    Options are those of `plan`; with `precision="fp64"` the tolerance of sharding is 1e-10. In
    mixed precision sums round in every layout; so the same plan also runs with all casts lifted to
    float64, which must agree to 1e-10, except in a job. With `compile="regions"` the same plan also
    runs without, except in a job: fused kernels round in another order, so each of the two is
    compared with one process; "auto" stands for "regions" where a compiler is. The inputs must be
    real tensors; a model on meta gets random weights. In a job, every rank must call it, and every
    rank gets the report.
    `torch.no_grad` around it changes nothing.

    Raises `BatchError` for inputs on meta, `OptionError` under `torch.inference_mode`, and
    `VerificationError` if the model itself fails.
    """
    if torch.is_inference_mode_enabled():
        raise OptionError(
            "verify under torch.inference_mode(): it runs a step, with gradients",
            hint="call it outside",
        )
    checked = Options.of(**options)
    if not dist.is_initialized():
        if checked.compile == "auto":  # whatever it stands for in a run
            checked = replace(checked, compile="none" if lacking(CPU, "regions") else "regions")
        if checked.compiles:
            require_compiler(CPU, checked.compile)
    inputs = {k: v for k, v in flatten_inputs(example_inputs).items() if isinstance(v, Tensor)}
    _check_real(inputs)
    program = capture_step(model, example_inputs, checked)
    is_mixed = checked.dtypes.casts
    tolerance = TOLERANCE.get(checked.precision, TOLERANCE["model"])
    if is_mixed:
        tolerance = tolerance_of(program)
    if dist.is_initialized():
        return _verify_in_job(model, mesh, program, example_inputs, inputs, tolerance, options)
    plan = plan_program(program, Mesh.of(mesh), example_inputs, checked)
    parameters, buffers = whole_parameters(program, model), whole_buffers(program, model)
    check = compare_capture(
        model, example_inputs, inputs, checked.loss_fn, program.accumulation, parameters | buffers,
        precision=_unlifted(checked),
    )  # fmt: skip
    wanted = reference(program, parameters, inputs, buffers, plan.data.microbatches)
    report = Report(
        thread_errors(plan, parameters, buffers, inputs, wanted), tolerance, plan, *check
    )
    if checked.compiles:
        assert plan.bound is not None, "a plan that was just made is bound"
        eager = Plan(plan.data, plan.bound.run_as(compile="none"))
        errors = thread_errors(eager, parameters, buffers, inputs, wanted)
        report = replace(report, uncompiled_errors=errors)
    if is_mixed:
        lifted = _lifted_errors(model, example_inputs, inputs, checked, plan, parameters, buffers)
        report = replace(report, lifted_errors=lifted, lifted_tolerance=IN_FLOAT64)
    return report


def _unlifted(options: Options) -> Precision:
    return replace(options.dtypes, is_lifted=False)


def _lifted_errors(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | Sequence[Any],
    inputs: Mapping[str, Tensor],
    options: Options,
    plan: Plan,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> dict[str, float]:
    """The errors of the plan's placements on the same graph with every float as float64."""
    program = capture_step(model, example_inputs, options, options.dtypes.lifted())
    lifted = on_program(plan, program, example_inputs, options)
    wide = {n: widened(p.detach()).requires_grad_(p.requires_grad) for n, p in parameters.items()}
    held = {n: widened(b) for n, b in buffers.items()}
    given = {n: widened(t) for n, t in inputs.items()}
    wanted = reference(program, wide, given, held, plan.data.microbatches)
    return thread_errors(lifted, wide, held, given, wanted)


def _check_real(inputs: Mapping[str, Tensor]) -> None:
    for path, value in inputs.items():
        if value.is_meta:
            raise BatchError(
                f"input `{path}` is on meta, and `verify` runs a step",
                hint="give real tensors, such as torch.randint(n_tokens, shape) or torch.randn",
            )


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
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        buffers = whole_buffers(program, model)
        buffers |= {name: before[name] for name in buffers.keys() & before.keys()}
        # The other ranks wait for the result, so a failure must reach them too.
        try:
            check: CaptureCheck | str = compare_capture(
                model, example_inputs, inputs, options.get("loss_fn"), program.accumulation,
                before | buffers, seed, _unlifted(Options.of(**options)),
            )  # fmt: skip
        except AutoparError as error:
            check = str(error)
        parameters = {
            info.name: values[info.name].to(info.dtype).requires_grad_(info.requires_grad)
            for info in program.parameters.values()
        }
        n_microbatches = module.plan.data.microbatches
        wanted = reference(program, parameters, inputs, buffers, n_microbatches, seed)
        errors["loss"] = relative_error(loss.cpu(), wanted.loss)
        for name, gradient in gradients.items():
            errors[name] = relative_error(gradient, wanted.gradients[name])
        for name in buffers.keys() & values.keys():
            errors[name] = relative_error(values[name], wanted.buffers[name])
        box = [(errors, check)]
    dist.broadcast_object_list(box, src=0)
    errors, check = box[0]
    if isinstance(check, str):
        raise VerificationError(check)
    return Report(errors, tolerance, module.plan, *check)
