"""The captured program on one process against the user's module (`compare_capture`).

Both run in the model's own dtypes: models of transformers cast to float32 inside even if they are
built in float64, and a program that is lifted to float64 leaves these casts out. What remains is
rounding, because capture writes some operators as others that are equal (`linear` as matmul and
sum, attention with dropout by its parts). So the tolerance follows the coarsest dtype in which the
program carries gradient (`tolerance_of`): 1e-6 in float32, which is 8 units of its precision, as
many units in bfloat16 (7e-2) and float16 (8e-3), and 1e-10 if all is float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture import LossFn, capture, draws_of, whole_buffers
from autopar.parity.alone import reference, whole_parameters
from autopar.parity.eager import ModuleStep, module_step, same
from autopar.parity.report import relative_error
from autopar.precision import AS_IT_IS, Precision
from autopar.program.graph import Accumulation, Program

IN_FLOAT32, IN_FLOAT64 = 1e-6, 1e-10
N_ROUNDINGS = 256  # units of precision of the largest number by which a gradient may be off


class CaptureCheck(NamedTuple):
    """Errors by name and their tolerance; `not_compared` says why there are none."""

    errors: dict[str, float]
    tolerance: float
    not_compared: str | None


def compare_capture(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | Sequence[Any],
    inputs: Mapping[str, Tensor],
    loss_fn: LossFn | None,
    accumulation: Accumulation | None,
    values: Mapping[str, Tensor],
    seed: int = 0,
    precision: Precision = AS_IT_IS,
) -> CaptureCheck:
    """Capture `model` in the dtypes of its training, and compare one step with the module's.

    inputs    the tensors of `example_inputs`, by path
    values    parameters and buffers to start from, by name; others are the model's
    """
    program = capture(
        model, example_inputs, precision=precision, loss_fn=loss_fn, accumulation=accumulation
    )
    parameters = {
        name: values.get(name, value).detach().to("cpu", value.dtype).clone()
        for name, value in whole_parameters(program, model).items()
    }
    buffers = {
        name: values.get(name, value).detach().to("cpu", value.dtype)
        for name, value in whole_buffers(program, model).items()
    }
    found_in = module_step(
        model, example_inputs, loss_fn, parameters, buffers, accumulation, seed, precision
    )
    tolerance = tolerance_of(program)
    if reason := _unpaired(program, found_in):
        return CaptureCheck({}, tolerance, reason)
    leaves = {
        info.name: parameters[info.name].requires_grad_(info.requires_grad)
        for info in program.parameters.values()
    }
    captured = reference(program, leaves, inputs, buffers, 1, seed)
    wanted = found_in.result
    errors = {"loss": relative_error(captured.loss, wanted.loss)}
    names = [info.name for info in program.parameters.values() if info.requires_grad]
    scale = least_scale([wanted.gradients[n] for n in names], found_in.largest, tolerance)
    for name in names:
        errors[name] = relative_error(captured.gradients[name], wanted.gradients[name], scale)
    for name, value in wanted.buffers.items():
        before = found_in.before[name]
        if name in captured.buffers or not same(value, before):
            errors[name] = relative_error(captured.buffers.get(name, before), value)
    return CaptureCheck(errors, tolerance, None)


def tolerance_of(program: Program) -> float:
    """The tolerance for a program in its own dtypes."""
    values = [program.value(program.node(name)).dtype for name in program.parameters]
    for node in program.graph.nodes:
        if node.name in program.has_grad:
            leaves = pytree.tree_leaves(program.value(node))
            values += [v.dtype for v in leaves if isinstance(v, Tensor)]
    floats = {dtype for dtype in values if dtype.is_floating_point or dtype.is_complex}
    coarsest = max(torch.finfo(dtype).eps for dtype in floats)
    if coarsest == torch.finfo(torch.float64).eps:
        return IN_FLOAT64
    return IN_FLOAT32 * coarsest / torch.finfo(torch.float32).eps


def least_scale(gradients: Sequence[Tensor], largest: float, tolerance: float) -> float:
    """The least scale of a gradient's error: the largest element of all gradients, at most 1.

    Mean losses make all gradients small, and their errors too. A gradient's own largest element
    would not do: that of the bias of attention's keys is 0 but for rounding. All gradients may be,
    as those of a student that equals its teacher. Then what rounding makes of the `largest` number
    of backward is within the tolerance. In half precision such gradients look like any others.
    """
    found = max((g.abs().max().item() for g in gradients if g.numel()), default=1.0)
    coarsest = max((torch.finfo(g.dtype).eps for g in gradients), default=1.0)
    rounding = N_ROUNDINGS * coarsest * largest
    if coarsest <= torch.finfo(torch.float32).eps and found <= rounding:
        found = rounding / tolerance
    return min(1.0, found) or 1.0


def _unpaired(program: Program, found: ModuleStep) -> str | None:
    """Why module and program cannot draw the same random numbers; None if they did."""
    if found.unpaired:
        return f"the model draws random numbers with `{'`, `'.join(found.unpaired)}`"
    wanted = draws_of(program)
    for drawn in found.drawn:
        for number, draw in wanted.items():
            if drawn.get(number) != draw:
                return (
                    f"random operator {number} of the captured program is {_described(draw)}; "
                    f"that of the module: {_described(drawn.get(number))}"
                )
    return None


def _described(draw: tuple[str, tuple[int, ...]] | None) -> str:
    return f"`{draw[0]}` of shape {draw[1]}" if draw is not None else "none"
