"""Whole programs on thread ranks against one process: what the tests of the algebra share.

`model_case` captures a small model, `random_strategy` draws a legal assignment, `thread_step` runs
it on thread ranks (`tests/helpers/ranks.py`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost.laws import CostModel
from autopar.manual import Recompute
from autopar.mesh import Device, Link, LogicalMesh
from autopar.passes.analysis import MODES, Analysis
from autopar.passes.intra import (
    Constraints,
    IntraOpProblem,
    PlacementRequest,
    choose,
    intra_op_problem,
)
from autopar.passes.lowering import lower
from autopar.placement import Spec
from autopar.program.communication import step_calls
from autopar.program.lines import (
    OperatorStrategy,
    Period,
    Pipeline,
    Recomputed,
    StageProgram,
    Storage,
    Strategy,
)
from autopar.runtime.groups import CollectiveCall
from tests.helpers.captures import captured
from tests.helpers.jobs import gpt2, llama, tokens
from tests.helpers.machines import AXIS_NAMES
from tests.helpers.ranks import Batch, above, pipeline_step

BATCH, SEQUENCE, WIDTH, HEADS, VOCABULARY = 16, 4, 16, 4, 16


class Mlp(nn.Module):
    """Linear and ReLU layers under a mean of squares."""

    def __init__(self, width: int = WIDTH, n_layers: int = 3) -> None:
        super().__init__()
        layers = [m for _ in range(n_layers) for m in (nn.Linear(width, width), nn.ReLU())]
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.net(x) - y).pow(2).mean()


class BertBlock(nn.Module):
    """Attention and an MLP; `by` says how the fused QKV is taken apart, `norm` where norms are."""

    def __init__(self, width: int, n_heads: int, by: str, norm: str) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.n_heads, self.by, self.norm = n_heads, by, norm

    def heads(self, fused: Tensor) -> Sequence[Tensor]:
        """q, k, v as [batch, heads, sequence, size]."""
        b, s, h = *fused.shape[:2], fused.shape[2] // 3
        if self.by in ("view", "index"):
            seen = fused.view(b, s, 3, self.n_heads, -1)
            if self.by == "view":
                return seen.permute(2, 0, 3, 1, 4).unbind(0)
            return [seen.transpose(1, 3)[:, :, i] for i in range(3)]
        parts = {
            "chunk": lambda: fused.chunk(3, -1),
            "split": lambda: fused.split(h, -1),
            "slice": lambda: [fused[..., i * h : (i + 1) * h] for i in range(3)],
        }[self.by]()
        return [part.view(b, s, self.n_heads, -1).transpose(1, 2) for part in parts]

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.qkv(x))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))

    def widen(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.norm == "pre":
            x = x + self.attend(self.norm_1(x))
            return x + self.widen(self.norm_2(x))
        x = self.norm_1(x + self.attend(x))
        return self.norm_2(x + self.widen(x))


class Bert(nn.Module):
    """BERT blocks under a mean of squares."""

    def __init__(
        self, width: int = WIDTH, n_heads: int = HEADS, n_layers: int = 1, by: str = "view",
        norm: str = "post",
    ) -> None:  # fmt: skip
        super().__init__()
        self.blocks = nn.Sequential(*(BertBlock(width, n_heads, by, norm) for _ in range(n_layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).pow(2).mean()


def tiny_gpt2(n_layers: int = 1) -> nn.Module:
    return gpt2(n_layers, n_embd=WIDTH, vocab_size=VOCABULARY, n_positions=SEQUENCE)


def tiny_llama(n_layers: int = 1) -> nn.Module:
    return llama(n_layers, WIDTH, VOCABULARY, SEQUENCE)


def random_rows(seed: int, *names: str) -> dict[str, Tensor]:
    """Real inputs [batch, width], or [batch, sequence, width] for a single name."""
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, WIDTH) if len(names) > 1 else (BATCH, SEQUENCE, WIDTH)
    return {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name in names}


def random_tokens(seed: int) -> dict[str, Tensor]:
    return tokens(seed, BATCH, SEQUENCE, VOCABULARY)


TEXT_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]] = {
    "mlp": (Mlp, lambda seed: random_rows(seed, "x", "y")),
    "bert-view": (Bert, lambda seed: random_rows(seed, "x")),
    "bert-chunk": (lambda: Bert(by="chunk"), lambda seed: random_rows(seed, "x")),
    "gpt2": (tiny_gpt2, random_tokens),
    "llama": (tiny_llama, random_tokens),
}
MODELS = tuple(TEXT_MODELS)
# ZeRO stage -> how long gathered parameters are kept.
ZERO: dict[int, Period] = {1: "step", 2: "micro", 3: "use"}


@dataclass(frozen=True)
class Case:
    """A captured model and how to draw batches for it."""

    analysis: Analysis
    batch: Callable[[int], dict[str, Tensor]]


@lru_cache
def model_case(name: str) -> Case:
    """The analysis of one of `MODELS`."""
    make_model, batch = TEXT_MODELS[name]
    program = captured(make_model(), batch(0), precision="fp64")
    return Case(Analysis.of(program), batch)


@lru_cache
def language_model(make: Callable[[int], nn.Module], n_blocks: int) -> Analysis:
    return Analysis.of(captured(make(n_blocks), random_tokens(0), precision="fp64"))


@lru_cache
def abstract_cost(sizes: tuple[int, ...], device: Device | None = None) -> CostModel:
    """Unit links and one flop per second: every time is a count."""
    device = device or Device(1.0, 1e30, 1e15, 0.0)
    links = (Link(1.0, 1.0),) * len(sizes)
    return CostModel(LogicalMesh(sizes, AXIS_NAMES[len(sizes)], links, device), torch.float64)


def placed(
    problem: IntraOpProblem, choice: Sequence[int]
) -> tuple[dict[str, OperatorStrategy], dict[str, Storage]]:
    """The placements and the storage that a choice of a problem without repeats means."""
    operators = dict[str, OperatorStrategy]()
    for index, candidates in enumerate(problem.candidates):
        operators |= candidates.strategies(choice[index])
    at = problem.parameter_variables.items()
    return operators, {name: problem.storages[name][choice[v]] for name, v in at}


def recomputed(problem: IntraOpProblem, choice: Sequence[int]) -> tuple[Recomputed, ...]:
    """The ranges that run again in backward, of the same."""
    chosen = ((of, None if of.variable is None else choice[of.variable]) for of in problem.modes)
    found = (of.recomputed(k) for of, k in chosen)
    return tuple(item for item in found if item is not None)


@lru_cache
def free_problem(model: str, sizes: tuple[int, ...], n_microbatches: int) -> IntraOpProblem:
    """Every choice the planner has for a model."""
    analysis, cost = model_case(model).analysis, abstract_cost(sizes)
    return intra_op_problem(analysis, cost, n_microbatches, Constraints(), "adamw")


def random_strategy(
    analysis: Analysis, problem: IntraOpProblem, n_microbatches: int, rng: random.Random
) -> Strategy:
    """A legal assignment; in every second one the operators of a group part company too."""
    together = rng.random() < 0.5
    operators: dict[str, OperatorStrategy] = {}
    for candidates in problem.candidates:
        shared = rng.randrange(len(candidates))
        for item in candidates.group.members:
            choice = shared if together else rng.randrange(len(candidates))
            operators[item.name] = candidates.strategies(choice)[item.name]
    storage = {
        name: rng.choice(storages)
        for name, storages in legal_storages(analysis, problem, operators).items()
    }
    return Strategy(
        operators,
        storage,
        analysis.microbatch_types(n_microbatches).tensors,
        analysis.batch.cells,
        analysis.batch.size,
        n_microbatches,
    )


def legal_storages(
    analysis: Analysis, problem: IntraOpProblem, operators: Mapping[str, OperatorStrategy]
) -> dict[str, list[Storage]]:
    """How each parameter may be kept where operators use it as they do."""
    uses: dict[str, list[Spec]] = {name: [] for name in problem.storages}
    for operator in analysis.operators:
        for value, spec in zip(operator.inputs, operators[operator.name].inputs, strict=True):
            if value in uses:
                uses[value].append(spec)
    return {
        name: [s for s in storages if _is_sensible(s, uses[name])]
        for name, storages in problem.storages.items()
    }


def _is_sensible(storage: Storage, uses: list[Spec]) -> bool:
    """ZeRO-2 and ZeRO-3 need something to gather, for every use."""
    return storage.period == "step" or all(
        any(
            kept.is_shard and used.kind in ("R", "I")
            for kept, used in zip(storage.spec.placements, use.placements, strict=True)
        )
        for use in uses
    )


# Modes in which operators run again, not gathers alone.
OPERATOR_MODES: tuple[Recompute, ...] = tuple(mode for mode in MODES if mode != "gathers")


def random_ranges(
    analysis: Analysis, rng: random.Random, modes: Sequence[Recompute] = MODES
) -> tuple[Recomputed, ...]:
    """One to four, up to all operators, next to each other or apart."""
    names = [operator.name for operator in analysis.operators]
    n_edges = 2 * rng.randint(1, 4)
    edges = sorted(rng.choices(range(len(names) + 1), k=n_edges))
    spans = list(zip(edges[::2], edges[1::2], strict=True))
    if rng.random() < 0.5:  # no operator is left between two
        spans = list(itertools.pairwise(edges))
    return tuple(Recomputed(rng.choice(modes), tuple(names[a:b])) for a, b in spans if a < b)


def zero_strategy_of(
    analysis: Analysis, cost: CostModel, stage: int, n_microbatches: int
) -> Strategy:
    plain = frozenset({"tensor", "sequence"})
    dp = Constraints(plain | {"zero1", "zero2", "zero3"})
    chosen = choose(analysis, PlacementRequest(cost, n_microbatches, dp), "adamw", None).strategy
    if stage == 0:
        return chosen
    problem = intra_op_problem(analysis, cost, n_microbatches, Constraints(plain), "adamw")
    storage = {
        name: next((s for s in options if s.period == ZERO[stage] and _is_sharded(s)), options[0])
        for name, options in problem.storages.items()
    }
    return replace(chosen, storage=storage)


def _is_sharded(storage: Storage) -> bool:
    return any(p.is_shard for p in storage.spec.placements)


@dataclass(frozen=True)
class Step:
    """Errors by the parity law; the collectives rank 0 executed, and those read off its program."""

    errors: Mapping[str, float]
    calls: tuple[CollectiveCall, ...]
    foretold: tuple[CollectiveCall, ...]

    @property
    def wrong(self) -> dict[str, float]:
        """Errors above the tolerance; NaN is one."""
        return above(self.errors)


def thread_step(
    analysis: Analysis, cost: CostModel, strategy: Strategy, batch: Batch, seed: int
) -> Step:
    """Lower, emit and run one step of a strategy; parameters are drawn from `seed`."""
    stage = lower(analysis, strategy, cost)
    errors, calls = pipeline_step(analysis.program, Pipeline.single(stage, cost.mesh), batch, seed)
    return Step(errors, calls[0], foretold_calls(stage))


def foretold_calls(stage: StageProgram) -> tuple[CollectiveCall, ...]:
    """The collectives read off a stage's program."""
    names = stage.axis_names
    return tuple(
        CollectiveCall(c.kind, tuple(names[a] for a in c.axes), c.size_bytes, c.phase)
        for c in step_calls(stage)
    )


@pytest.fixture(autouse=True)
def generated_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Generated programs go to the test's own folder (import this fixture to use it)."""
    monkeypatch.setenv("AUTOPAR_CODE_DIR", str(tmp_path))
    return tmp_path
