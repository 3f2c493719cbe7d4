"""Facts that belong to no other room: what the passes of `pipeline.py` hand to each other.

The other facts are `Program`, `Analysis`, `PlanningResult`, `PlanData`, `Pipeline` and `Predicted`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.analysis import Analysis, Paddings
from autopar.passes.binding import ExampleInputs
from autopar.passes.lowering import PlacedStage
from autopar.plans import InputSignature, StageRecord
from autopar.program import Pipeline


@dataclass(frozen=True)
class Target:
    """What is compiled for: a machine, and the user's options."""

    mesh: Mesh
    options: Options


@dataclass(frozen=True)
class Source:
    """What is compiled: the user's model and one global batch."""

    model: nn.Module
    example_inputs: ExampleInputs


@dataclass(frozen=True)
class Inputs:
    """Tensor inputs by path, the other leaves of the batch, and whether they are positional."""

    tensors: tuple[InputSignature, ...]
    static: Mapping[str, Any]
    positional: bool


@dataclass(frozen=True)
class KeptWhole:
    """Operators without a rule that every rank runs whole."""

    operators: tuple[str, ...]


@dataclass(frozen=True)
class SearchSpace:
    """The program with every padding that could help, analysed; and the options that fit it."""

    analysis: Analysis
    paddings: Paddings
    options: Options


@dataclass(frozen=True)
class Placed:
    """The stages with all their placements, each on its ranks."""

    stages: tuple[PlacedStage, ...]


@dataclass(frozen=True)
class Unverified:
    """Lowered stages, joined, that nobody has checked."""

    pipeline: Pipeline


@dataclass(frozen=True)
class Sources:
    """File name -> generated source, one per stage."""

    files: dict[str, str]


@dataclass(frozen=True)
class Trained:
    """The training program that evaluation shares its shards with."""

    placed: Placed
    pipeline: Pipeline


@dataclass(frozen=True)
class EvaluationStages:
    """Placements of evaluation, stage by stage, as text: rank 0's, for all ranks."""

    records: tuple[StageRecord, ...]
