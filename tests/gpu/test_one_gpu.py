"""One GPU: parity of ranks that share it, flash kernels, and steps that never wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import autopar
from autopar import Manual
from autopar.calibration import calibrate
from autopar.capture import whole_buffers
from autopar.options import Options
from autopar.parity import reference, thread_errors, whole_parameters
from autopar.planning import plan_program
from tests.helpers.captures import captured
from tests.helpers.jobs import CASES, machine

LAYOUTS = {
    "tensor": ((1, 2), Manual(tp=2)),
    "sequence": ((1, 2), Manual(tp=2, sp=True)),
    "zero-3": ((1, 2), Manual(dp=2, zero=3)),
    "both": ((2, 2), Manual(dp=2, tp=2, zero=1)),
}
N_WARM = 5  # the first steps compare batches between ranks, and allocate


@pytest.mark.parametrize("name", sorted(name for name in CASES if CASES[name].loss_fn is None))
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_ranks_on_one_gpu_obey_the_parity_law(gpu: torch.device, name: str, layout: str) -> None:
    case, (shape, manual) = CASES[name], LAYOUTS[layout]
    model, batch = case.model().double(), case.batch(0)
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    program = captured(model, batch, precision="fp64")
    options = Options.of(precision="fp64", manual=manual)
    plan = plan_program(program, machine(shape), batch, options)
    parameters, buffers = whole_parameters(program, model), whole_buffers(program, model)
    wanted = reference(program, parameters, batch, buffers, plan.data.microbatches)
    errors = thread_errors(plan, parameters, buffers, batch, wanted, gpu)
    assert max(errors.values()) <= 1e-10, errors


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_causal_attention_takes_the_flash_kernel(gpu: torch.device, precision: str) -> None:
    case = CASES["gpt2"]
    pm = autopar.parallelize(case.model(), (1, 1), case.batch(0), precision=precision)
    pm.step(**case.batch(0))
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        pm.step(**case.batch(1))
    kernels = {event.name for event in seen.events()}
    assert any("flash" in name for name in kernels), sorted(kernels)


@contextmanager
def refusing_syncs() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["model", "bf16-mixed", "bf16-autocast"])
def test_a_step_does_not_wait_for_the_gpu(gpu: torch.device, precision: str) -> None:
    """Only loss scaling does: it asks whether gradients are finite."""
    case = CASES["gpt2"]
    pm = autopar.parallelize(case.model(), (1, 1), case.batch(0), precision=precision)
    batch = {name: value.pin_memory() for name, value in case.batch(0).items()}
    for _ in range(N_WARM):
        pm.step(**batch)
    with refusing_syncs():
        pm.step(**batch)


def test_a_loader_brings_batches_ahead(gpu: torch.device) -> None:
    case = CASES["gpt2"]
    rows = [{name: value[0] for name, value in case.batch(seed).items()} for seed in range(32)]
    pm = autopar.parallelize(case.model(), (1, 1), case.batch(0))
    found = 0
    for batch in pm.dataloader(rows, 16, shuffle=False):
        assert batch["input_ids"].device == gpu
        wanted = torch.stack([row["input_ids"] for row in rows[16 * found : 16 * (found + 1)]])
        assert torch.equal(batch["input_ids"].cpu(), wanted)
        pm.step(**batch)
        found += 1
    assert found == 2


def test_calibration_measures_the_gpu(gpu: torch.device) -> None:
    made = calibrate(quick=True)
    assert made.machine.is_cuda
