"""Whole training steps that are timed, beside the cost model's predictions.

The programs are small and in plain torch. They are planned with the profile that was fitted to
operators and collectives alone. The runtime runs them, forward to optimizer:

    on one rank      all ranks at once, each with a step of its own
    by a recipe      sharded over all ranks

A time is the slowest rank's, as in a job. A round has one step of each program, so a step finds its
tensors in memory and not in caches. Sizes range from steps bound by compute to steps bound by the
interpreter. Recipes range from one large collective to many small ones. This spread tells the
ratios of `fit_steps` apart.

Whole steps show what repeated parts hide: fresh buffers and their page faults, autograd's
bookkeeping, the Python of runtime and optimizer, ranks that wait for each other. They also show
what the system takes from a core now and then; a median of timings of a few milliseconds hides it.

CPU only. On a GPU the interpreter runs beside the device, and its exposed time has another law
(`device.host_s`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.api import parallelize, plan
from autopar.calibration.samples import SampleGrid, StepProgram, StepSample
from autopar.calibration.timing import TimedCall, medians_s
from autopar.manual import Manual
from autopar.mesh import Mesh
from autopar.planning import Plan
from autopar.program.graph import flatten_inputs
from autopar.runtime.execute import Environment, Executor, load_code

Step = Callable[[int], None]

_VOCABULARY = 384
_RATE = 1e-3
_NO_LAUNCH = "device.launch_s=0x"
_NO_LINK = "link.intra_node.latency_s=0x,link.intra_node.s_per_byte=0x"


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.n_heads = max(1, width // 48)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(1, 2).flatten(2))


class _Block(nn.Module):
    """A block of an encoder: attention and an MLP of four times the width, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = _Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Encoder(nn.Module):
    """An encoder that predicts the tokens it reads."""

    def __init__(self, width: int, n_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(n_layers)))
        self.head = nn.Linear(width, _VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.head(self.blocks(self.embedding(x)))
        return F.cross_entropy(scores.flatten(0, 1), x.flatten())


class _Gated(nn.Module):
    """A feed-forward layer of many memory-bound operators: a norm and a gate written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.up, self.gate = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        gate = self.gate(y)
        return x + self.down(self.up(y) * gate * torch.sigmoid(gate))


class Perceptron(nn.Module):
    def __init__(self, width: int, n_layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(_Gated(width) for _ in range(n_layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def step_samples(profile: str, grid: SampleGrid, device: torch.device) -> list[StepSample]:
    """Steps of all programs of `grid`; `profile` is the path of the profile fitted to parts."""
    cases, samples = [], []
    for program in grid.step_programs:
        if program.recipe and dist.get_world_size() == 1:
            continue
        planned, step = (_sharded if program.recipe else _single_device)(program, profile, device)
        cases.append(TimedCall(step, by_slowest=True))
        samples.append(_predicted(program, planned))
    times_s = medians_s(cases, device, 0.0, grid.n_step_rounds)
    return [replace(s, time_s=time_s) for s, time_s in zip(samples, times_s, strict=True)]


def _made(program: StepProgram, n_ranks: int) -> tuple[nn.Module, Tensor]:
    """The model, and the input of all ranks."""
    torch.manual_seed(0)
    rows = program.rows * n_ranks
    if program.kind == "encoder":
        shape = rows, program.length
        tokens = torch.randint(0, _VOCABULARY, shape)
        return Encoder(program.width, program.n_layers), tokens
    x = torch.randn(rows * program.length, program.width)
    return Perceptron(program.width, program.n_layers), x


def _predicted(program: StepProgram, planned: Plan) -> StepSample:
    """The program's step as the profile predicts it; its measured time is not set yet."""
    whole_s = planned.predicted.step_time_s
    launch_s, transfer_s = (
        whole_s - planned.what_if(free).predicted.step_time_s for free in (_NO_LAUNCH, _NO_LINK)
    )
    work_s = whole_s - launch_s - transfer_s
    return StepSample(program.name, program.size, work_s, launch_s, transfer_s, 0.0)


def _sharded(program: StepProgram, profile: str, device: torch.device) -> tuple[Plan, Step]:
    """The plan and the step of a program sharded over all ranks."""
    n_ranks = dist.get_world_size()
    recipe = Manual(dp=n_ranks, zero=3 if program.recipe == "zero3" else 0)
    model, x = _made(program, n_ranks)
    mesh = Mesh((1, n_ranks), hardware=profile)
    module = parallelize(model, mesh, (x,), manual=recipe, microbatches=1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=_RATE)

    def step(i: int) -> None:
        module.step(x)
        optimizer.step()
        optimizer.zero_grad()

    return module.plan, step


def _single_device(program: StepProgram, profile: str, device: torch.device) -> tuple[Plan, Step]:
    """The plan and the step of a program on this rank alone: the executor without groups."""
    model, x = _made(program, 1)
    planned = plan(model, Mesh((1, 1), hardware=profile), (x,), microbatches=1)
    assert planned.bound is not None
    pipeline, captured = planned.bound.pipeline, planned.bound.analysis.program
    ((name, source),) = planned.code().items()
    constants = {key: make() for key, make in captured.constants.items()}
    codes = {0: load_code(name, source)[0]}
    executor = Executor(pipeline, 0, codes, Environment(device, {}), constants)
    stored = dict(_stored(planned, model))
    leaves = flatten_inputs((x,))
    inputs = {key: leaves[info.path] for key, info in captured.inputs.items()}
    optimizer = torch.optim.AdamW(stored.values(), lr=_RATE)

    def step(i: int) -> None:
        executor.step(stored, inputs)
        optimizer.step()
        optimizer.zero_grad()

    return planned, step


def _stored(planned: Plan, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters of the model itself: on one rank a shard is the whole."""
    assert planned.bound is not None
    named = dict(model.named_parameters())
    for stored in planned.bound.pipeline.stages[0].parameters:
        yield stored.name, named[stored.name]
