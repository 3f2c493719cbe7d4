"""One decision of a plan and its alternatives: passes compute them, reports print them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autopar.placement import Spec
from autopar.program.lines import OperatorStrategy, Storage

# What the cost of an option assumes of everything else on the stage: it is chosen "anew", so that
# the stage is the fastest one with this option, or "kept" as in the plan.
RestOfStage = Literal["anew", "kept"]


@dataclass(frozen=True)
class Option:
    """One way to decide: the `storage` and `uses` of a parameter, or an operator's `strategy`.

    `extra_s` (per step) and `extra_bytes` (per device) are relative to the fastest option. An
    `extra_s` of 0 means as fast, up to rounding.
    """

    storage: Storage | None
    uses: tuple[Spec, ...]
    strategy: OperatorStrategy | None
    extra_s: float
    extra_bytes: float


@dataclass(frozen=True)
class Choice:
    """The options of a decision that are worth showing.

    `chosen`       the plan's own option; None if the search does not consider it
    `others`       the best of the rest, fastest first; if one is slower than the fastest, at least
                   one such is here
    `n_options`    how many options there are
    `n_as_fast`    how many are as fast as the fastest
    `blocks`       (3, 48): 3 of the stage's 48 repeated blocks were compared; None: the whole stage
    `runs_again`   the stage recomputes operators; the costs count them as if they ran once
    """

    chosen: Option | None
    others: tuple[Option, ...]
    n_options: int
    n_as_fast: int
    rest: RestOfStage
    blocks: tuple[int, int] | None = None
    runs_again: bool = False


@dataclass(frozen=True)
class Decision:
    """What a plan decided for one parameter or operator on one stage.

    `name` is the plan's key. `source` is the user's line of an operator. `read_by` lists the
    operators that read a parameter, as "key (file:line)". `choice` is None if a recipe decided;
    `recipe` names it.
    """

    name: str
    stage: int
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    source: str
    read_by: tuple[str, ...]
    choice: Choice | None
    recipe: str = ""


@dataclass(frozen=True)
class RunnerUp:
    """An option that the plan did not take, and the seconds a step that it costs more than the
    fastest one; 0 means as fast."""

    decided: Storage | OperatorStrategy
    extra_s: float
