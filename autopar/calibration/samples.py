"""What is timed, and what a timing yields.

A sample is work as the cost model charges it, with its measured seconds. Ranks that share cores
take turns: `turns` = ranks on the machine / cores, at least 1. A law's time is multiplied by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from autopar.units import format_bytes

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class OperatorSample:
    """Operators on one rank while all ranks were busy; a backward counts as more operators.

    `dtype` is that of a matmul; "" for operators without a fitted rate. `flops` and `size_bytes`
    are totals of all `n_operators`. `size` is for display.
    """

    name: str
    size: str
    dtype: str
    flops: float
    size_bytes: float
    n_operators: int
    time_s: float


@dataclass(frozen=True)
class TransferSample:
    """One collective, or message (`send_recv`), over `n_ranks` of a machine."""

    kind: str
    size_bytes: int
    n_ranks: int
    turns: float
    time_s: float

    @property
    def name(self) -> str:
        return f"{self.kind} over {self.n_ranks}"

    @property
    def size(self) -> str:
        return format_bytes(self.size_bytes)


@dataclass(frozen=True)
class StepSample:
    """A whole training step, timed on the slowest rank.

    The profile fitted to operators and collectives alone predicts `work_s` for matmuls and memory,
    `launch_s` for launches and `transfer_s` for collectives.
    """

    name: str
    size: str
    work_s: float
    launch_s: float
    transfer_s: float
    time_s: float


@dataclass
class Samples:
    """All measurements, with `n_busy` ranks unless noted otherwise.

    `issue` are small operators timed by the interpreter's clock, on devices that have their own.
    `turns`: (ranks that share the cores, operator time / operator time with `n_busy` ranks).
    """

    n_busy: int
    operators: list[OperatorSample] = field(default_factory=list)
    transfers: list[TransferSample] = field(default_factory=list)
    issue: list[OperatorSample] = field(default_factory=list)
    attention: list[OperatorSample] = field(default_factory=list)
    turns: list[tuple[int, float]] = field(default_factory=list)
    steps: list[StepSample] = field(default_factory=list)


@dataclass(frozen=True)
class StepProgram:
    """What a timed step trains, on `rows` rows of `length` positions of each rank.

    `recipe` shards it over all ranks; with "" every rank runs a step of its own.
    """

    kind: Literal["encoder", "perceptron"]
    width: int
    n_layers: int
    rows: int
    length: int
    recipe: Literal["", "dp", "zero3"] = ""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.recipe}".rstrip()

    @property
    def size(self) -> str:
        return f"{self.n_layers} layers of {self.width}, {self.rows} x {self.length}"


@dataclass(frozen=True)
class SampleGrid:
    """The sizes that are measured, and for how long.

    `product_shapes` are (m, n, k) of matmuls x[m, k] w[n, k]; those above `most_flops[dtype]` are
    left out. `sample_s` is the aimed length of one timing, `n_rounds` the number of timings. Steps
    are timed one by one, `n_step_rounds` times.
    """

    product_shapes: tuple[Shape, ...]
    most_flops: tuple[tuple[str, float], ...]
    memory_rows: tuple[int, ...]
    width: int
    transfer_bytes: tuple[int, ...]
    sample_s: float
    n_rounds: int
    step_programs: tuple[StepProgram, ...] = ()
    n_step_rounds: int = 0


_KIB, _MIB = 1 << 10, 1 << 20
_SHAPES = ((256, 256), (768, 256), (256, 1024), (1024, 1024))

CPU = SampleGrid(
    product_shapes=tuple((m, n, k) for m in (128, 512, 2048) for n, k in _SHAPES),
    most_flops=(("float64", 1.1e9), ("float32", 1.1e9), ("bfloat16", 3e8), ("float16", 7e7)),
    memory_rows=(1, 1024, 4096, 16384),
    width=256,
    transfer_bytes=(_KIB, 64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 16 * _MIB),
    sample_s=0.01,
    n_rounds=11,
    step_programs=(
        StepProgram("encoder", 192, 3, 8, 96),
        StepProgram("encoder", 384, 2, 4, 64),
        StepProgram("encoder", 96, 5, 2, 32),
        StepProgram("perceptron", 320, 2, 8, 80),
        StepProgram("perceptron", 128, 2, 8, 320),
        StepProgram("perceptron", 64, 6, 1, 64),
        StepProgram("encoder", 144, 3, 4, 64, "dp"),
        StepProgram("encoder", 144, 3, 4, 64, "zero3"),
        StepProgram("encoder", 288, 2, 4, 96, "zero3"),
        StepProgram("perceptron", 320, 3, 4, 64, "dp"),
    ),
    n_step_rounds=31,
)
QUICK_CPU = SampleGrid(
    product_shapes=((128, 256, 256), (1024, 256, 256), (256, 512, 512)),
    most_flops=(("float64", 2e8), ("float32", 2e8), ("bfloat16", 2e8), ("float16", 2e7)),
    memory_rows=(1, 4096),
    width=256,
    transfer_bytes=(_KIB, 256 * _KIB, 2 * _MIB),
    sample_s=0.002,
    n_rounds=5,
    step_programs=(
        StepProgram("perceptron", 192, 1, 4, 96),
        StepProgram("perceptron", 64, 1, 1, 32),
        StepProgram("perceptron", 96, 1, 4, 32, "zero3"),
    ),
    n_step_rounds=5,
)
_CUDA_FLOPS = (("float64", 2e11), ("float32", 1e12), ("bfloat16", 2e13), ("float16", 2e13))
CUDA = SampleGrid(
    product_shapes=tuple(
        (m, n, k) for m in (512, 2048, 8192) for n in (1024, 4096, 12288) for k in (1024, 4096)
    ),
    most_flops=_CUDA_FLOPS,
    memory_rows=(1, 2048, 8192, 16384),
    width=4096,
    transfer_bytes=(_KIB, 64 * _KIB, _MIB, 16 * _MIB, 64 * _MIB, 256 * _MIB),
    sample_s=0.02,
    n_rounds=11,
)
QUICK_CUDA = SampleGrid(
    product_shapes=((2048, 1024, 1024), (4096, 4096, 4096)),
    most_flops=_CUDA_FLOPS,
    memory_rows=(1, 8192),
    width=4096,
    transfer_bytes=(_KIB, _MIB, 64 * _MIB),
    sample_s=0.01,
    n_rounds=5,
)
