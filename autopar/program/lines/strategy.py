"""Typed facts: what passes decide about a frozen program.

Inside a fact, keys are names of values or operators. The solver and the Megatron recipe provide the
same facts, and everything downstream reads only these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autopar.manual import Recompute
from autopar.placement import Spec, TensorType
from autopar.rules import Lowering

# How often a parameter that is stored in shards is gathered, and its gradient reduce_scattered:
#   step   gathered once a step, gradients accumulated whole and scattered once    (ZeRO-1)
#   micro  gathered once a step, gradients scattered after each microbatch         (ZeRO-2)
#   use    gathered at each use, forward and backward, scattered each microbatch   (ZeRO-3)
Period = Literal["step", "micro", "use"]


@dataclass(frozen=True)
class Recomputed:
    """Operators that run again before their backward: names of consecutive operators, in order."""

    mode: Recompute
    operators: tuple[str, ...]


@dataclass(frozen=True)
class Storage:
    """How one parameter is stored between steps, and how often it is gathered for use."""

    spec: Spec
    period: Period = "step"


@dataclass(frozen=True)
class OperatorStrategy:
    """Specs of one operator's tensors, in order; `lowered` replaces it over `lowered_axes`."""

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    lowered: Lowering | None = None
    lowered_axes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Strategy:
    """The whole choice: one strategy per operator, one storage per parameter.

    types                factor-refined types of one microbatch
    batch_cells          value -> its batch factor
    sequence_forbidden   no reshard of an activation uses reduce_scatter
    received, sent       specs of the values that cross from and to other stages
                         (`stage_program.Boundary`)
    recomputed           disjoint ranges of operators, in order
    """

    operators: Mapping[str, OperatorStrategy]
    storage: Mapping[str, Storage]
    types: Mapping[str, TensorType]
    batch_cells: Mapping[str, tuple[int, int]]
    batch_size: int
    n_microbatches: int
    sequence_forbidden: bool = False
    received: Mapping[str, Spec] = field(default_factory=dict)
    sent: Mapping[str, Spec] = field(default_factory=dict)
    recomputed: tuple[Recomputed, ...] = ()
