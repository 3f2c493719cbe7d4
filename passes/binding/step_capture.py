"""The graph of a training step: of the whole batch, or of one microbatch.

If the loss is a sum over rows, the step is planned on the graph of the whole batch, and its
microbatches are parts of that graph. With another loss (contrastive, batch statistics) microbatches
are gradient accumulation. They are used only if the user asks for them, and the graph is that of
one microbatch (`autopar/capture/accumulate.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from autopar.capture import accumulation_of, capture
from autopar.options import Options
from autopar.passes.analysis import accept_missing, batch_of
from autopar.passes.binding.inputs import ExampleInputs, planned_row_dims
from autopar.plans import PlanData
from autopar.precision import Precision
from autopar.program.graph import Accumulation, Program

LossFn = Callable[..., Tensor]


def capture_step(
    model: nn.Module, example_inputs: ExampleInputs, options: Options,
    precision: Precision | None = None,
) -> Program:  # fmt: skip
    """The program of a training step, before there is a plan; `precision` overrules the options.

    Warns if the microbatches asked for are gradient accumulation, because then their number changes
    the loss.
    """

    def captured(accumulation: Accumulation | None = None) -> Program:
        return capture(
            model, example_inputs, precision=precision or options.dtypes, loss_fn=options.loss_fn,
            accumulation=accumulation,
        )  # fmt: skip

    program = captured()
    if not _asks_for_several(options):
        return program
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the planner warns
        accept_missing(program, options.fallback)
    batch = batch_of(program, options.batch_dims)
    n = _asked_microbatches(options, batch.size)
    if n == 1 or batch.broken_at is None:
        return program
    part = captured(accumulation_of(example_inputs, n, options.batch_dims or {}))
    warnings.warn(
        f"microbatches={n}: the loss is not a sum over rows ({batch.broken_at}), so this is "
        f"gradient accumulation: the mean of the losses of {n} parts of the batch",
        stacklevel=3,
    )
    return part


def capture_plan(
    model: nn.Module, example_inputs: ExampleInputs, data: PlanData, loss_fn: LossFn | None
) -> Program:
    """The program that a plan was made for."""
    return capture(
        model, example_inputs, precision=data.dtypes, loss_fn=loss_fn,
        accumulation=planned_accumulation(data, example_inputs),
    )  # fmt: skip


def planned_accumulation(data: PlanData, example_inputs: ExampleInputs) -> Accumulation | None:
    """How a plan's graph is captured if it is the graph of one microbatch; else None."""
    if not data.accumulates:
        return None
    return accumulation_of(example_inputs, data.microbatches, planned_row_dims(data))


def options_for(program: Program, options: Options) -> Options:
    """The options with the number of microbatches that the program was captured for."""
    if program.accumulation is None:
        return options
    manual = options.manual and replace(options.manual, microbatch_size=None)
    return replace(options, microbatches=program.accumulation.n, manual=manual)


def _asks_for_several(options: Options) -> bool:
    by_size = options.manual is not None and options.manual.microbatch_size is not None
    return by_size or (isinstance(options.microbatches, int) and options.microbatches > 1)


def _asked_microbatches(options: Options, n_rows: int) -> int:
    if isinstance(options.microbatches, int):
        return options.microbatches
    assert options.manual is not None and options.manual.microbatch_size is not None
    return max(n_rows // (options.manual.dp * options.manual.microbatch_size), 1)
