"""Measure what autopar generates beside what is written by hand: `make bench-runtime`.

    python -m examples.bench_runtime [--rows ddp,zero-3] [--pairs 15] [--layers 4] [--width 256]
    python -m examples.bench_runtime --compiled [--activation gelu_new] [--rows ...]
    python -m examples.bench_runtime --delayed [--compiled] [--rows ...] [--layers 12] [--share 0.5]

One GPT-2 with the same weights and batch, in float32. Both sides of a row live in the same
processes.

    row             ranks   autopar                            beside
    eager           1       one rank                           the model itself, `loss.backward()`
    tp              2       `Manual(tp=2)`                     `examples/megatron_gpt2.py`
    ddp             2       `Manual(dp=2)`                     `DistributedDataParallel`
    zero-3          2       `Manual(dp=2, zero=3)`             `fully_shard` of each block
    1f1b            2       `Manual(pp=2)`                     `Schedule1F1B`
    interleaved     2       `Manual(pp=2, interleave=2)`       `ScheduleInterleaved1F1B`
    zero-bubble     2       `Manual(pp=2)` and this schedule   `ScheduleInterleavedZeroBubble`
    zero-bubble-v   2       `Manual(pp=2)` and this schedule   `ScheduleZBVZeroBubble`

Pipelines have 4 microbatches and the same stages on both sides. A rank has one, or two under
interleaved and zero-bubble-v. torch's interleaved zero bubble, with one stage a rank, is ZB-H1.

    losses      of `N_LOSSES` steps with plain SGD between, so gradients are compared too. They
                must agree to 1e-5, or nothing is timed
    step time   gradients cleared, forward, backward with all its communication. The optimizer's
                step is left out on both sides. A pair is a step of each, after `N_WARM_UP`; which
                goes first alternates. A step's time is the slowest rank's. The ratio is the median
                over pairs, with the 90% interval of bootstrap resamples, as in
                `examples/compare.py`
    kernels     a second table says where a step of each side goes (`examples/bench_parts.py`)

`--compiled` has each row twice, with `compile="regions"` on autopar's side: beside the other one in
eager mode, and compiled as its documentation says (each block or stage by `torch.compile`, a whole
model on one process). torch compiles no stage whose backward is split, so zero bubble has one line.
The default activation is the tanh GELU as one kernel, which leaves little to fuse.
With `--activation gelu_new` it is Hugging Face's own, eight operators, on both sides of each row.

`--delayed` shows overlap, of `ddp`, `zero-3` and `ring`, on autopar's side alone. Collectives are
delayed as on a slow network (`examples/bench_delays.py`). A pair is a step without delays and one
with. With `--compiled` each row comes a second time, with `compile="regions"`: regions must hide
as much.

    compute         a step without delays; it contains the true time of the collectives
    communication   the delays of a step, `--share` of the compute. Gradients of `ddp` hide behind
                    backward alone, two thirds of it
    delayed step    a step with delays
    ratio           delayed step / max(compute, communication): 1 if all is hidden
    no overlap      (compute + communication) / max(compute, communication)

`ring` has one long sequence on two ranks, so that attention is most of a step: its keys and values
go round beside it.

Of pipelines, `--delayed` delays messages, each by `--share` of a stage's forward, and compares the
step with its simulation (`examples/bench_messages.py`); the ratio should be 0.9 to 1.1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.activations import ACT2FN

import autopar
from autopar import Manual
from autopar.units import format_seconds
from examples import bench_messages
from examples.bench_delays import Delays
from examples.bench_parts import Parts, parts_of
from examples.compare import N_WARM_UP, Batch, Size, median_ratio, timed_pair, values_of
from examples.megatron_gpt2 import Block, MegatronGPT2, TensorParallel
from examples.pipeline_gpt2 import PipelineGPT2, ScheduleName
from examples.train_gpt2 import ROWS as N_SAMPLES
from examples.train_gpt2 import batches

TOLERANCE = 1e-5
N_LOSSES = 3
LEARNING_RATE = 0.1
N_MICROBATCHES = 4
MICROBATCH = N_SAMPLES // N_MICROBATCHES
BOTH = ", both compiled"  # ends the name of a line in which the other is compiled, too
ALPHA_SHARE = 0.1  # of the communication, in delays that do not depend on bytes
Launch = Callable[..., list[Any]]
Pairs = list[tuple[float, float]]


@dataclass(frozen=True)
class Side:
    """A module in training. `step` is forward and backward; not every rank must have its loss.

    `samples` are the rows of the batch that this rank takes; None: all.
    """

    module: nn.Module
    forward_backward: Callable[[Batch], Tensor | None]
    samples: slice | None = None

    def step(self, batch: Batch) -> Tensor | None:
        self.module.zero_grad()
        if self.samples is not None:
            batch = {name: x[self.samples] for name, x in batch.items()}
        return self.forward_backward(batch)


@dataclass(frozen=True)
class Row:
    """One comparison: autopar's plan, and what it is compared with.

    `length` is that of its one sequence, of a row that has a batch of its own.
    """

    ours: str
    theirs: str
    n_ranks: int
    manual: Manual | None
    other: Callable[[Size, Batch, bool], Side] | None
    compiled: str | None  # the other, compiled; None: it cannot be
    tied: bool = True
    schedule: str = "auto"
    forbid: tuple[str, ...] = ()
    length: int = 0


@dataclass(frozen=True)
class Measured:
    """Losses (autopar's, the other's) of each step, pairs of seconds in the same order, parts."""

    losses: list[tuple[float, float]]
    pairs: Pairs
    parts: tuple[Parts, ...] = ()


@dataclass(frozen=True)
class Overlap:
    """Pairs (seconds without delays, seconds with) and the delays of one step."""

    pairs: Pairs
    n_calls: int
    size_bytes: int
    delay_s: float

    @property
    def compute_s(self) -> float:
        return statistics.median(compute_s for compute_s, _ in self.pairs)

    def ratio(self) -> tuple[float, float, float]:
        """Delayed step / max(compute, communication), by pairs; with its 90% interval."""
        longer = [(with_s, max(alone_s, self.delay_s)) for alone_s, with_s in self.pairs]
        return median_ratio(longer)


def with_autopar(row: Row, size: Size, batch: Batch, is_compiled: bool = False) -> Side:
    """The unmodified Hugging Face model through `autopar.parallelize`."""
    module = autopar.parallelize(
        size.model(), (1, row.n_ranks), batch, precision="model", manual=row.manual,
        schedule=row.schedule, compile="regions" if is_compiled else "none",
        forbid={*row.forbid},
    )  # fmt: skip
    return Side(module, lambda given: module.step(**given))


def set_activation(model: nn.Module, size: Size) -> None:
    """Give hand-written blocks the activation of the Hugging Face model."""
    for block in model.modules():
        if isinstance(block, Block) and size.activation != Size.activation:
            block.activation = ACT2FN[size.activation]


def compile_each(blocks: nn.Sequential | nn.ModuleList) -> None:
    """Compile each block, as is advised for DDP, FSDP2 and tensor parallelism."""
    for block in blocks:
        block.compile(dynamic=False)


def eager(size: Size, batch: Batch, is_compiled: bool) -> Side:
    model = size.model()
    if is_compiled:
        model.compile(dynamic=False)
    return Side(model, lambda given: backward(model(**given).loss))


def megatron(size: Size, batch: Batch, is_compiled: bool) -> Side:
    assert dist.group.WORLD is not None
    tp = TensorParallel(dist.group.WORLD, is_counting=not is_compiled)
    model = MegatronGPT2(values_of(size, "model"), size.n_heads, tp)
    set_activation(model, size)
    if is_compiled:
        compile_each(model.blocks)
    return Side(model, lambda given: backward(model(**given)))


def ddp(size: Size, batch: Batch, is_compiled: bool) -> Side:
    own: Any = size.model()
    if is_compiled:
        compile_each(own.transformer.h)
    model = DistributedDataParallel(own)
    return Side(model, lambda given: backward(model(**given).loss), own_samples(batch))


def fsdp(size: Size, batch: Batch, is_compiled: bool) -> Side:
    """FSDP2: a group of parameters for each block, and one for all others."""
    model: Any = size.model()
    if is_compiled:
        compile_each(model.transformer.h)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Side(model, lambda given: backward(model(**given).loss), own_samples(batch))


def pipelining(schedule: ScheduleName, size: Size, batch: Batch, is_compiled: bool) -> Side:
    rows, length = batch["input_ids"].shape
    values = values_of(size, "model")
    pipeline = PipelineGPT2(values, size.n_heads, rows, length, N_MICROBATCHES, schedule)
    set_activation(pipeline.module, size)
    if is_compiled:
        compile_each(pipeline.module)
    return Side(pipeline.module, lambda given: pipeline.step(**given))


ROWS = {
    "eager": Row("one rank", "eager", 1, None, eager, "torch.compile(model)"),
    "tp": Row("tp=2", "Megatron by hand", 2, Manual(tp=2), megatron, "Megatron, compiled blocks"),
    "ddp": Row("dp=2", "torch DDP", 2, Manual(dp=2), ddp, "DDP, compiled blocks"),
    "zero-3": Row(
        "dp=2, zero=3", "torch FSDP2", 2, Manual(dp=2, zero=3), fsdp, "FSDP2, compiled blocks"
    ),
    "1f1b": Row(
        "pp=2, 1F1B", "torch Schedule1F1B", 2, Manual(pp=2, microbatch_size=MICROBATCH),
        partial(pipelining, "1f1b"), "1F1B, compiled stages", tied=False,
    ),
    "interleaved": Row(
        "pp=2 x 2, interleaved", "torch ScheduleInterleaved1F1B", 2,
        Manual(pp=2, interleave=2, microbatch_size=MICROBATCH),
        partial(pipelining, "interleaved"), "Interleaved1F1B, compiled stages", tied=False,
    ),
    "zero-bubble": Row(
        "pp=2, ZB-H1", "torch InterleavedZeroBubble", 2,
        Manual(pp=2, microbatch_size=MICROBATCH), partial(pipelining, "zero-bubble"), None,
        tied=False, schedule="zero-bubble",
    ),
    "zero-bubble-v": Row(
        "pp=2 x 2, ZB-V", "torch ScheduleZBVZeroBubble", 2,
        Manual(pp=2, microbatch_size=MICROBATCH), partial(pipelining, "zero-bubble-v"), None,
        tied=False, schedule="zero-bubble-v",
    ),
    "ring": Row(
        "cp=2, ring", "", 2, None, None, None, forbid=("data", "tensor", "pipeline"), length=4096
    ),
}  # fmt: skip
DELAYED = ("ddp", "zero-3", "ring")
PIPELINES = ("1f1b", "interleaved", "zero-bubble", "zero-bubble-v")
DELAYED_LAYERS = 12  # the first and the last block of ZeRO-3 are waited for


def backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss.detach()


def own_samples(batch: Batch) -> slice:
    """This rank's rows, where ranks get different ones."""
    n = len(batch["input_ids"]) // dist.get_world_size()
    return slice(dist.get_rank() * n, (dist.get_rank() + 1) * n)


def whole_loss(loss: Tensor | None) -> float:
    """The mean over the ranks that have a loss: of their rows, or the whole batch's."""
    everyone: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, None if loss is None else loss.item())
    return statistics.fmean(each for each in everyone if each is not None)


def measure(
    name: str, size: Size, batch: Batch, n_pairs: int, ours: bool = False, theirs: bool = False
) -> Measured:
    """One rank's part of a row: compare losses, then time pairs if they agree.

    `ours` and `theirs`: is autopar's side compiled, is the other?
    """
    row = ROWS[name]
    assert row.other is not None, f"{name} is compared with nothing"
    sides = with_autopar(row, size, batch, ours), row.other(size, batch, theirs)
    optimizers = [torch.optim.SGD(s.module.parameters(), lr=LEARNING_RATE) for s in sides]
    losses = []
    for _ in range(N_LOSSES):
        ours_loss, theirs_loss = (whole_loss(side.step(batch)) for side in sides)
        losses.append((ours_loss, theirs_loss))
        for optimizer in optimizers:
            optimizer.step()
    if disagreements(name, losses):
        return Measured(losses, [])
    for side in sides * N_WARM_UP:
        side.step(batch)
    one, other = (side.step for side in sides)
    pairs = [timed_pair(one, other, batch, i % 2 == 1) for i in range(n_pairs)]
    return Measured(losses, pairs, tuple(parts_of(partial(side.step, batch)) for side in sides))


def measure_delayed(
    name: str, size: Size, batch: Batch, n_pairs: int, share: float, is_compiled: bool = False
) -> Overlap:
    """One rank's part of `--delayed`: the same step without delays and with."""
    if length := ROWS[name].length:
        size = replace(size, width=128, n_heads=4, n_positions=length)
        ids = torch.randint(
            size.vocabulary, (1, length), generator=torch.Generator().manual_seed(0)
        )
        batch = {"input_ids": ids, "labels": ids}
    side = with_autopar(ROWS[name], size, batch, is_compiled)
    for _ in range(N_LOSSES + N_WARM_UP):  # the first steps of a module compare the batch, too
        side.step(batch)
    times = [timed_pair(side.step, side.step, batch, False) for _ in range(3)]
    compute_s = statistics.median(time_s for pair in times for time_s in pair)
    with Delays(0, 0) as counted:
        side.step(batch)
    communication_s = share * compute_s
    delays = Delays(
        ALPHA_SHARE * communication_s / counted.n_calls,
        (1 - ALPHA_SHARE) * communication_s / counted.size_bytes,
    )

    def delayed(given: Batch) -> None:
        delays.clear()
        with delays:
            side.step(given)

    pairs = [timed_pair(side.step, delayed, batch, i % 2 == 1) for i in range(n_pairs)]
    return Overlap(pairs, delays.n_calls, delays.size_bytes, delays.delay_s)


def measure_messages(
    name: str, size: Size, batch: Batch, n_pairs: int, share: float, is_compiled: bool = False
) -> bench_messages.Delayed:
    """One rank's part of `--delayed` for a pipeline."""
    side = with_autopar(ROWS[name], size, batch, is_compiled)
    for _ in range(N_LOSSES + N_WARM_UP):
        side.step(batch)
    assert isinstance(side.module, autopar.ParallelModule)
    script = side.module.plan.simulate().record.script
    return bench_messages.measure(side.step, script, batch, n_pairs, share)


def disagreements(name: str, losses: Sequence[tuple[float, float]]) -> list[str]:
    """The losses that are not equal, as texts."""
    return [
        f"{name}: losses of step {index} differ: autopar {ours}, {other_side_name(name)} {theirs}"
        for index, (ours, theirs) in enumerate(losses)
        if not abs(ours - theirs) <= TOLERANCE  # NaN is in no tolerance
    ]


def row_of(name: str) -> Row:
    """The row of a line of the tables."""
    return ROWS[name.partition(",")[0]]


def other_side_name(name: str) -> str:
    """What autopar is compared with in a line of the tables."""
    row = row_of(name)
    return row.compiled if row.compiled and name.endswith(BOTH) else row.theirs


def time_table(found: dict[str, Measured]) -> Table:
    table = Table(title="step time without optimizer, float32, interleaved pairs")
    for title in ("row", "autopar", "beside"):
        table.add_column(title)
    for title in ("pairs", "autopar", "other", "ratio", "90% interval", "losses differ by"):
        table.add_column(title, justify="right")
    for name, measured in found.items():
        row = row_of(name)
        texts = ["-"] * 4
        if measured.pairs:
            ratio, low, high = median_ratio(measured.pairs)
            times = zip(*measured.pairs, strict=True)
            medians = [format_seconds(statistics.median(column)) for column in times]
            texts = [*medians, f"{ratio:.3f}", f"{low:.3f} to {high:.3f}"]
        apart = max(abs(ours - theirs) for ours, theirs in measured.losses)
        n_pairs = str(len(measured.pairs))
        table.add_row(name, row.ours, other_side_name(name), n_pairs, *texts, f"{apart:.0e}")
    return table


def parts_table(found: dict[str, Measured]) -> Table:
    table = Table(title="where a step goes, on rank 0")
    for title in ("row", "side"):
        table.add_column(title)
    for title in ("matmuls", "other kernels", "between kernels"):
        table.add_column(title, justify="right")
    for name, measured in found.items():
        sides = f"autopar {row_of(name).ours}", other_side_name(name)
        for side, parts in zip(sides, measured.parts, strict=False):
            table.add_row(name, side, *parts.texts())
    return table


def overlap_table(found: dict[str, Overlap]) -> Table:
    table = Table(title="step time with delayed collectives, float32, interleaved pairs")
    for title in ("row", "autopar"):
        table.add_column(title)
    for title in ("pairs", "calls", "compute", "communication", "delayed step", "ratio",
                  "90% interval", "no overlap"):  # fmt: skip
        table.add_column(title, justify="right")
    for name, seen in found.items():
        compute_s, with_s = (statistics.median(times) for times in zip(*seen.pairs, strict=True))
        ratio, low, high = seen.ratio()
        serial = (compute_s + seen.delay_s) / max(compute_s, seen.delay_s)
        times = [format_seconds(time_s) for time_s in (compute_s, seen.delay_s, with_s)]
        table.add_row(
            name, row_of(name).ours, str(len(seen.pairs)), str(seen.n_calls), *times,
            f"{ratio:.3f}", f"{low:.3f} to {high:.3f}", f"{serial:.3f}",
        )  # fmt: skip
    return table


def names_of(text: str) -> list[str]:
    """`--rows`: names with commas between."""
    names = text.split(",")
    for name in names:
        if name not in ROWS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(ROWS)}")
    return names


def main(argv: Sequence[str] | None = None, launch: Launch = autopar.launch) -> int:
    """Print a table; 1 if losses differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=names_of, help=f"of {','.join(ROWS)}; all by default")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--layers", type=int, help=f"{Size.n_layers}; {DELAYED_LAYERS} if delayed")
    parser.add_argument("--width", type=int, default=Size.width)
    parser.add_argument("--activation", default=Size.activation)
    parser.add_argument("--compiled", action="store_true", help="beside eager and compiled others")
    parser.add_argument("--delayed", action="store_true", help="delay collectives, show overlap")
    parser.add_argument("--share", type=float, default=0.5, help="communication / compute")
    given = parser.parse_args(argv)
    compared = [name for name, row in ROWS.items() if row.other is not None]
    names = given.rows or [*((*DELAYED, *PIPELINES) if given.delayed else compared)]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    (batch,) = batches(1)
    layers = given.layers or (DELAYED_LAYERS if given.delayed else Size.n_layers)
    if given.delayed:
        if alone := [name for name in names if name not in (*DELAYED, *PIPELINES)]:
            rows = ", ".join((*DELAYED, *PIPELINES))
            parser.error(f"--delayed has the rows {rows}, not {', '.join(alone)}")
        seen: dict[str, Any] = {}
        for name in names:
            size = Size(layers, given.width, activation=given.activation, tied=ROWS[name].tied)
            job = measure_messages if name in PIPELINES else measure_delayed
            asked = job, 2, name, size, batch, given.pairs, given.share
            seen[name] = launch(*asked)[0]
            if given.compiled:
                seen[f"{name}, compiled"] = launch(*asked, True)[0]
        pipelines = {n: of for n, of in seen.items() if isinstance(of, bench_messages.Delayed)}
        if others := {n: of for n, of in seen.items() if n not in pipelines}:
            console.print(overlap_table(others))
        if pipelines:
            console.print(bench_messages.table_of(pipelines))
        return 0
    if alone := [name for name in names if name not in compared]:
        parser.error(f"{', '.join(alone)}: only with --delayed")
    found = {}
    for name in names:
        size = Size(layers, given.width, activation=given.activation, tied=ROWS[name].tied)
        run = partial(launch, measure, ROWS[name].n_ranks, name, size, batch, given.pairs)
        found[name] = run(given.compiled)[0]
        if given.compiled and ROWS[name].compiled is not None:
            found[name + BOTH] = run(True, True)[0]
    console.print(time_table(found))
    console.print(parts_table(found))
    wrong = [line for name in found for line in disagreements(name, found[name].losses)]
    for line in wrong:
        console.print(line, markup=False, soft_wrap=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
