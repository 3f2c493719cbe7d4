"""Whole training steps that are timed, beside what the cost model says of them.

Small programs in plain torch, each planned on a mesh of one rank with the profile that operators
alone have given, and run by the runtime's own executor: forward to optimizer, on every rank at
once, the slowest rank's time as in a job. One step of each makes a round, so tensors of a step
come out of memory and not out of caches. Widths and lengths go from steps that compute to steps
that wait for the interpreter, which is what tells the two ratios of `fit_steps` apart.

What shows here and not in operators that repeat: fresh buffers and their page faults, autograd's
bookkeeping, the runtime's and the optimizer's Python, and what the system takes from a core now
and then, which the median of timings of a few milliseconds leaves out.

CPU only: on a GPU the interpreter works beside the device, and what of it shows is another law
(`device.host_s`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.calibration.samples import Grid, StepProgram, StepSample
from autopar.calibration.timing import Case, medians_s
from autopar.mesh import Mesh
from autopar.planning import Plan, plan
from autopar.program import flatten_inputs
from autopar.runtime.executor import Environment, Executor
from autopar.runtime.load import load_code

_VOCABULARY = 384


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
    """Of an encoder: attention and four times its width, after norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = _Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Encoder(nn.Module):
    """Predicts the tokens that it reads."""

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


def step_samples(profile: str, grid: Grid, device: torch.device) -> list[StepSample]:
    """Steps of all programs of `grid`; `profile` is the path of what operators gave."""
    cases, samples = [], []
    for program in grid.step_programs:
        model, batch = _made(program)
        planned = plan(model, Mesh((1, 1), hardware=profile), batch, microbatches=1)
        cases.append(Case(_training(planned, model, batch, device), by_slowest=True))
        samples.append(_predicted(program, planned))
    times_s = medians_s(cases, device, 0.0, grid.n_step_rounds)
    return [replace(s, time_s=time_s) for s, time_s in zip(samples, times_s, strict=True)]


def _made(program: StepProgram) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    if program.kind == "encoder":
        shape = program.rows, program.length
        tokens = torch.randint(0, _VOCABULARY, shape)
        return Encoder(program.width, program.n_layers), {"x": tokens}
    x = torch.randn(program.rows * program.length, program.width)
    return Perceptron(program.width, program.n_layers), {"x": x}


def _predicted(program: StepProgram, planned: Plan) -> StepSample:
    """What the profile says, launches and the rest of it, without a time yet."""
    whole_s = planned.predicted.step_time_s
    work_s = planned.what_if("device.launch_s=0x").predicted.step_time_s
    return StepSample(f"step of {program.kind}", program.size, work_s, whole_s - work_s, 0.0)


def _training(
    planned: Plan, model: nn.Module, batch: Mapping[str, Tensor], device: torch.device
) -> Callable[[int], None]:
    """A step of the plan on this rank alone, whatever the world is."""
    assert planned.bound is not None
    pipeline, program = planned.bound.pipeline, planned.bound.analysis.program
    ((name, source),) = planned.code().items()
    constants = {key: make() for key, make in program.constants.items()}
    executor = Executor(pipeline, 0, load_code(name, source)[0], Environment(device, {}), constants)
    stored = dict(_stored(planned, model))
    leaves = flatten_inputs(batch)
    inputs = {key: leaves[info.path] for key, info in program.inputs.items()}
    optimizer = torch.optim.AdamW(stored.values(), lr=1e-3)

    def step(i: int) -> None:
        executor.step(stored, inputs)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _stored(planned: Plan, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The model's own parameters: on one rank a shard is the whole."""
    assert planned.bound is not None
    named = dict(model.named_parameters())
    for stored in planned.bound.pipeline.stages[0].parameters:
        yield stored.name, named[stored.name]
