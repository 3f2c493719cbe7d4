"""Facts that no other room defines: what the passes of `pipeline.py` hand to each other.

The other facts are `Program`, `Analysis`, `Hardware`, `PlanningResult`, `PlanData`, `Pipeline` and
`Predicted`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.cost.hardware import Hardware
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.analysis import Analysis, Paddings
from autopar.passes.binding import ExampleInputs
from autopar.passes.lowering import PlacedStage
from autopar.plans import InputSignature, StageRecord
from autopar.program.lines import JointProgram, Pipeline


@dataclass(frozen=True)
class Target:
    """The machine to compile for, the user's options, and the type of device that kernels are for.

    A plan is made without devices. Its programs are printed for "cpu" then.
    """

    mesh: Mesh
    options: Options
    device: str = "cpu"


@dataclass(frozen=True)
class Source:
    """The user's model and one global batch."""

    model: nn.Module
    example_inputs: ExampleInputs


@dataclass(frozen=True)
class Inputs:
    """The tensor inputs of the batch, its other leaves by path, and whether it is positional."""

    tensors: tuple[InputSignature, ...]
    static: Mapping[str, Any]
    positional: bool


@dataclass(frozen=True)
class KeptWhole:
    """Operators without a rule, which every rank runs whole."""

    operators: tuple[str, ...]


@dataclass(frozen=True)
class SearchSpace:
    """The analysed program with every padding that may help, the options that fit it, and the
    machine in numbers."""

    analysis: Analysis
    paddings: Paddings
    options: Options
    hardware: Hardware


@dataclass(frozen=True)
class Placed:
    """The stages, each with all its placements and on its ranks."""

    stages: tuple[PlacedStage, ...]


@dataclass(frozen=True)
class Unverified:
    """The lowered and joined stages, before they are verified."""

    pipeline: Pipeline


@dataclass(frozen=True)
class Differentiated:
    """The stages' programs with their backward written out."""

    stages: tuple[JointProgram, ...]


@dataclass(frozen=True)
class Sources:
    """File name -> generated source, one per stage."""

    files: dict[str, str]


@dataclass(frozen=True)
class Trained:
    """The training program whose shards evaluation uses."""

    placed: Placed
    pipeline: Pipeline


@dataclass(frozen=True)
class EvaluationStages:
    """Placements of evaluation, one record per stage: rank 0 chooses them for all ranks."""

    records: tuple[StageRecord, ...]
