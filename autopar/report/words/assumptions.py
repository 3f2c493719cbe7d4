"""What a prediction takes for granted, and which dtypes would pay, in lines of text.

    assumed    the device's rates and what MFU counts; bytes of state; what overlap costs
    host       where launching kernels takes longer than they do
    experts    how uneven their rows are (`uneven_experts`)
    documents  which pairs they show, and how uneven microbatches are (`packed_documents`)
    advice     other dtypes of matmuls, with an estimate of the gain

The estimate of a dtype: operators with matmuls take the ratio of the rates, others half of their
bytes (with TF32 as many), and communication stays. It is an estimate; plan with the option to know.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from autopar.cost.hardware import Hardware, ProfiledDevice
from autopar.cost.memory import static_bytes_per_param
from autopar.plans import PlanData, Predicted
from autopar.program.lines import (
    CallLine,
    Pipeline,
    StageProgram,
    every_parameter,
    line_counts,
    starred,
)
from autopar.units import format_seconds

_LEAST_GAIN = 1.1  # below, advice is noise
_TERA = 1e12
_N_NAMES = 2  # of parameters whose state a line is about
# Half precision of a model -> the policy that computes in it and keeps state in float32.
_KEPT_WIDE = {torch.bfloat16: "bf16-mixed", torch.float16: "fp16-mixed"}


@dataclass(frozen=True)
class Remark:
    """A line; `advises` of one that may change what a reader does."""

    label: str
    text: str
    advises: bool = False

    def __str__(self) -> str:
        return f"{self.label}: {self.text}"


def assumed(
    hardware: Hardware, data: PlanData, pipeline: Pipeline, predicted: Predicted
) -> Sequence[Remark]:
    """The lines of a plan on its machine."""
    dtype, lines = hardware.dtype, [_rates(hardware), *_state(data, pipeline)]
    busiest = max(pipeline.stages, key=lambda program: sum(_times_s(program)))
    if isinstance(hardware.device, ProfiledDevice):
        lines += _host(hardware.device, busiest, pipeline.n_microbatches)
        lines += _advice(hardware.device, dtype, busiest, pipeline.n_microbatches, predicted)
    return lines


def uneven_experts(imbalance: float, survives: float) -> Remark:
    """How unevenly rows are taken to choose experts, and how unevenly they may."""
    text = (
        f"the fullest expert has {imbalance:.3g} times the mean of rows; memory suffices for "
        f"{math.floor(100 * survives) / 100:g} times"
    )
    return Remark("experts", text)


def packed_documents(shown: float, loads: Sequence[float]) -> Remark:
    """What attention sees of packed rows, and which share of it the microbatches have."""
    least, most = (f"{load:.2f}" for load in (min(loads), max(loads)))
    text = (
        f"attention sees {shown:.2g} of the pairs of rows that are one document each; microbatches "
        f"of the slowest rank, {least} to {most} times the mean"
    )
    return Remark("documents", text)


def _rates(hardware: Hardware) -> Remark:
    achieved = hardware.device.flops_per_s / _TERA
    peak = hardware.peak_flops_per_s / _TERA
    dtype, name = hardware.dtype, _name(hardware.dtype)
    if dtype == torch.float32 and _uses_tf32() and isinstance(hardware.device, ProfiledDevice):
        name += " (TF32, if the device has it)"
    software = f" under {hardware.software}" if hardware.software != "autopar" else ""
    text = (
        f"{hardware.profile_name}{software}, {achieved:.3g} TFLOP/s of matmuls in {name} "
        f"(MFU counts {peak:.3g}), {hardware.device.bytes_per_s / _TERA:.3g} TB/s"
    )
    return Remark("assumed", text + _slowed(hardware) + _error(hardware))


def _slowed(hardware: Hardware) -> str:
    """What communication beside compute costs."""
    device = hardware.device
    if not isinstance(device, ProfiledDevice):
        return ""
    return f"; compute takes {device.overlap_slowdown_fraction:.0%} longer beside communication"


def _error(hardware: Hardware) -> str:
    """How far predictions on the profile are from published runs."""
    if hardware.interval_ratio is None:
        return ""
    return (
        f"; 80% of published steps lie within {hardware.interval_ratio - 1:.0%} of predicted ones"
    )


def _state(data: PlanData, pipeline: Pipeline) -> Iterator[Remark]:
    """Bytes of a trained parameter's state; a line, with names, per combination of dtypes."""
    kinds: dict[tuple[torch.dtype, torch.dtype], Counter[str]] = {}
    for program in pipeline.stages:
        for p in every_parameter(program):
            if p.requires_grad:
                kind = p.stored.dtype, (p.cast or p.stored).dtype
                kinds.setdefault(kind, Counter())[starred(p.name)] += math.prod(p.shape)
    for (stored, used), n_elements in sorted(kinds.items(), key=lambda item: -item[1].total()):
        of = static_bytes_per_param(data.optimizer, stored)
        text = (
            f"{of.total_bytes:g} bytes a parameter: {of.parameter_bytes:g} stored, "
            f"{of.gradient_bytes:g} of its gradient, {of.optimizer_bytes:g} of {data.optimizer}"
        )
        if used != stored:
            text += f"; and {used.itemsize} of its cast while a step runs"
        if stored in _KEPT_WIDE:
            text += f', all in {_name(stored)}; precision="{_KEPT_WIDE[stored]}" keeps float32'
        if len(kinds) > 1:
            text += f" ({_largest(n_elements)})"
        yield Remark("state", text, advises=stored in _KEPT_WIDE)


def _largest(n_elements: Counter[str]) -> str:
    """The names with most elements, and how many more there are."""
    names = [name for name, _ in n_elements.most_common(_N_NAMES)]
    n_more = len(n_elements) - len(names)
    return ", ".join(names) + (f" and {n_more} more" if n_more else "")


def _times_s(program: StageProgram) -> list[float]:
    """Forward and backward seconds of each operator in one microbatch."""
    counted = zip(program.body, line_counts(program), strict=True)
    return [(x.forward_s + x.backward_s) * n for x, n in counted if isinstance(x, CallLine)]


def _host(device: ProfiledDevice, program: StageProgram, n_microbatches: int) -> Iterator[Remark]:
    counted = zip(program.body, line_counts(program), strict=True)
    n_launches = sum(
        n * _n_launches(x, device.launch_s) for x, n in counted if isinstance(x, CallLine)
    )
    host_s, kernels_s = n_launches * device.host_s, sum(_times_s(program))
    if host_s > kernels_s:
        more_s = n_microbatches * (host_s - kernels_s)
        text = (
            f"{n_launches} launches of {format_seconds(device.host_s)} in a microbatch take "
            f"{format_seconds(host_s)}, and their kernels {format_seconds(kernels_s)}: the step "
            f"will take {format_seconds(more_s)} more than predicted"
        )
        yield Remark("host", text, advises=True)


def _advice(
    device: ProfiledDevice, dtype: torch.dtype, program: StageProgram, n_microbatches: int,
    predicted: Predicted,
) -> Iterator[Remark]:  # fmt: skip
    if dtype != torch.float32:
        return
    rates = dict(device.rates_flops_per_s)
    ways = [
        ('precision="bf16-mixed"', rates.get(torch.bfloat16), 0.5),
        ('TF32, torch.set_float32_matmul_precision("high"),', device.tf32_flops_per_s, 1.0),
    ]
    for way, rate, of_others in ways:
        if rate is None:
            continue
        gain = _gain(
            program, rates[dtype] / rate, of_others, device.launch_s, n_microbatches, predicted
        )
        if gain >= _LEAST_GAIN:
            text = f"{way} would be about {gain:.2g} times as fast"
            yield Remark("advice", text, advises=True)


def _gain(
    program: StageProgram, ratio: float, of_others: float, launch_s: float, n_microbatches: int,
    predicted: Predicted,
) -> float:  # fmt: skip
    """How many times as fast a step is whose matmuls take `ratio` of their time, and whose other
    operators take `of_others`."""
    counted = zip(program.body, line_counts(program), strict=True)
    saved_s = sum(
        max(x.forward_s + x.backward_s - _n_launches(x, launch_s) * launch_s, 0.0)
        * n
        * (1 - (ratio if x.flops else of_others))
        for x, n in counted
        if isinstance(x, CallLine)
    )
    left_s = predicted.step_time_s - n_microbatches * saved_s
    return predicted.step_time_s / left_s if left_s > 0 else 1.0


def _n_launches(line: CallLine, launch_s: float) -> int:
    """Kernels of an operator: none of a view, one more for its backward. What takes less than a
    launch is in a kernel that another operator began."""
    return sum(time_s > 0.0 and time_s >= launch_s for time_s in (line.forward_s, line.backward_s))


def _uses_tf32() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
