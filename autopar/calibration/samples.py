"""What is timed, and what a timing says.

A sample is work as the cost model charges it, and the seconds that it took. Ranks that share
cores take turns: `turns` = ranks on the machine / cores, at least 1, by which a time is divided
before it is compared with a law.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from autopar.units import format_bytes

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class OperatorSample:
    """Operators on one rank while all ranks were busy; a backward is operators of its own.

    `dtype` is that of a product, "" where no rate is fitted; `flops` and `size_bytes` are those of
    all `n_operators` together. `size` is for readers.
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
    """A whole training step, by the slowest of all ranks.

    By the profile that operators and collectives alone have given it takes `work_s` in products
    and memory, `launch_s` in launches and `transfer_s` in collectives.
    """

    name: str
    size: str
    work_s: float
    launch_s: float
    transfer_s: float
    time_s: float


@dataclass
class Samples:
    """All that is measured, with `n_busy` ranks where nothing else is said.

    `issue` are small operators on the clock of the interpreter, where that is another than the
    device's. `turns`: (ranks that share the cores, how many times as long operators take).
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

    `recipe` shards it over all ranks; "" for every rank a step of its own.
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
    """Sizes at which everything is measured, and how long.

    `product_shapes` are (m, n, k) of x[m, k] w[n, k]; products above `most_flops[dtype]` are left
    out. `sample_s` is how long one timing lasts at least, `n_rounds` how many there are; steps are
    timed one by one, `n_step_rounds` times.
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
