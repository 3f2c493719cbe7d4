"""Random programs beside one process: a kind of model, a layout and legal placements, from a seed.

Every draw is legal: any strategy of each operator, any storage of each parameter, cuts anywhere,
any range recomputed. Kinds are named models; `tests/fuzz/programs` draws models, too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar.cost.price import collectives_of
from autopar.errors import BatchError, NotSupportedError
from autopar.passes.analysis import Analysis
from autopar.passes.inter import n_operators
from autopar.passes.intra import Constraints
from autopar.program.communication import Collective, rank_collectives
from autopar.program.lines import Period, Pipeline
from autopar.runtime.groups import CollectiveCall
from autopar.schedule import CHUNKS, ORDERS, fewest_microbatches
from tests.helpers.captures import captured
from tests.helpers.harness import TEXT_MODELS, random_tokens
from tests.helpers.models import dropout_models, odd_models
from tests.helpers.models.moe_models import moe_model
from tests.helpers.pipeline_harness import Layout, Shapes, random_ends, random_pipeline
from tests.helpers.ranks import above, pipeline_step
from tests.parity.zoo import FAMILIES

Draw = Callable[[int], Mapping[str, Any]]
Row = tuple[str, str, str | tuple[str, ...], int]


@dataclass(frozen=True)
class Kind:
    """A model, its batches by seed, and what capture cannot infer."""

    make: Callable[[], nn.Module]
    batch: Draw
    batch_dims: Mapping[str, int | None] | None = None


SMALL: dict[str, Kind] = {
    **{name: Kind(*model) for name, model in TEXT_MODELS.items()},
    **{name: Kind(*model) for name, model in odd_models.MODELS.items()},
    "noisy": Kind(dropout_models.Noisy, dropout_models.rows),
    "mixtral, one layer": Kind(lambda: moe_model("mixtral"), random_tokens),
    "gpt_oss": Kind(lambda: moe_model("gpt_oss"), random_tokens),
}
ZOO: dict[str, Kind] = {
    f"zoo {name}": Kind(entry.make, entry.batch, entry.options.get("batch_dims"))
    for name, entry in FAMILIES.items()
}
NAMED = SMALL | ZOO
KINDS = tuple(NAMED)

# Meshes of one stage, or of several; reshard tables of three axes take long to build.
LAYOUTS: tuple[Shapes, ...] = (
    ((2,),),
    ((1, 2), (1, 2)),
    ((2, 2),),
    ((2, 1), (1, 1)),
    ((4,),),
    ((1, 1), (1, 3)),
    ((1, 3), (1, 1)),
    ((1, 4),),
    ((1, 1),) * 4,
    ((2, 1), (2, 1)),
    ((2, 1), (1, 2), (1, 1)),
    ((2, 2), (1, 1)),
)
THREE_AXES: Shapes = ((2, 2, 2),)
COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class RandomProgram:
    """A pipeline of a captured model; `text` says what was drawn."""

    analysis: Analysis
    pipeline: Pipeline
    batch: Mapping[str, Tensor]
    seed: int
    text: str = field(compare=False)


def random_program(
    kind: str, seed: int, shapes: Shapes | None = None, constraints: Constraints | None = None
) -> RandomProgram:
    """The same program for the same arguments; without `shapes`, layouts come in turn."""
    rng, analysis = random.Random(f"{kind} {seed}"), named_analysis(kind)
    layouts = (*LAYOUTS, THREE_AXES) if kind == "mlp" else LAYOUTS
    shapes = shapes or layouts[(seed + KINDS.index(kind)) % len(layouts)]
    return laid_out(analysis, named_batch(kind, seed), seed, shapes, rng, constraints, kind)


def laid_out(
    analysis: Analysis,
    batch: Mapping[str, Any],
    seed: int,
    shapes: Shapes,
    rng: random.Random,
    constraints: Constraints | None = None,
    name: str = "",
) -> RandomProgram:
    """A program on stages of these shapes, all else drawn."""
    layout = Layout(shapes, rng.choice(exact_counts(analysis)), rng.choice(("gpipe", "1f1b")))
    other = reordered(layout, random.Random(f"order {name} {seed}"), n_operators(analysis.program))
    period: Period | None = rng.choice((None, None, "micro", "use"))
    recomputes = rng.random() < 0.4
    draw = partial(
        random_pipeline, analysis, rng=rng, period=period, recomputes=recomputes,
        constraints=constraints,
    )  # fmt: skip
    ends = random_ends(analysis.program, other.n_stages, rng)
    pipeline = draw(ends, other)
    if other != layout and shares_a_name(pipeline):  # which is refused
        other, ends = layout, random_ends(analysis.program, layout.n_stages, rng)
        pipeline = draw(ends, other)
    text = f"{name}, {other}, stages end at {ends}, {period=}, {recomputes=}"
    return RandomProgram(analysis, pipeline, batch, seed, text)


def shares_a_name(pipeline: Pipeline) -> bool:
    """Do two stages of a rank use a parameter under one name?"""
    places = (
        [(pipeline.meshes[stage], name) for stage, name in tie.places] for tie in pipeline.ties
    )
    return any(len({*of_tie}) < len(of_tie) for of_tie in places)


def reordered(layout: Layout, rng: random.Random, most_stages: int) -> Layout:
    """Every other layout under another schedule, if that takes its numbers."""
    order = rng.choice([word for word in ORDERS if word not in ("gpipe", "1f1b")])
    fewest, most = CHUNKS[order]
    other = replace(layout, order=order, n_chunks=rng.randint(fewest, most or fewest + 1))
    p, m = len(layout.shapes), layout.n_microbatches
    takes = m >= fewest_microbatches(order, p) and other.n_stages <= most_stages
    return other if takes and rng.random() < 0.5 else layout


@lru_cache
def named_analysis(kind: str) -> Analysis:
    torch.manual_seed(0)
    one = NAMED[kind]
    return Analysis.of(
        captured(one.make().double(), named_batch(kind, 0), precision="fp64"), one.batch_dims
    )


def named_batch(kind: str, seed: int) -> dict[str, Any]:
    batch = NAMED[kind].batch(seed)
    return {n: v.double() if _is_real(v) else v for n, v in batch.items()}


def _is_real(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def exact_counts(analysis: Analysis) -> list[int]:
    """The numbers of microbatches that compute the same step."""
    counts = []
    for n in COUNTS:
        try:
            analysis.microbatch_types(n)
        except (BatchError, NotSupportedError):
            continue
        counts.append(n)
    return counts


def faults(program: RandomProgram) -> dict[str, Any]:
    """Values that differ from one process's, and collectives and messages that differ from those
    foretold, of every rank and of the first rank of each stage as a plan lists them; by name."""
    errors, calls = pipeline_step(
        program.analysis.program, program.pipeline, program.batch, program.seed
    )
    wrong: dict[str, Any] = {**above(errors)}
    meshes = program.pipeline.device_meshes
    firsts = sum((recorded_rows(calls[mesh.first_rank]) for mesh in meshes), Counter[Row]())
    if firsts != (listed := predicted_rows(collectives_of(program.pipeline))):
        wrong["calls that a plan lists"] = _difference(listed, firsts)
    for rank, of_rank in enumerate(calls):
        foretold = predicted_rows(rank_collectives(program.pipeline, rank))
        if foretold != (made := recorded_rows(of_rank)):
            wrong[f"calls of rank {rank}"] = _difference(foretold, made)
    return wrong


def predicted_rows(rows: Iterable[Collective]) -> Counter[Row]:
    counts: Counter[Row] = Counter()
    for c in rows:
        counts[c.kind, c.phase, c.axis, c.size_bytes] += c.count
    return counts


def recorded_rows(calls: Iterable[CollectiveCall]) -> Counter[Row]:
    return Counter(
        (c.kind, c.phase, c.axes[0] if len(c.axes) == 1 else c.axes, c.size_bytes) for c in calls
    )


def _difference(foretold: Counter[Row], made: Counter[Row]) -> str:
    return f"missing {dict(foretold - made)}, more {dict(made - foretold)}"
