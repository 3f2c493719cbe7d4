"""One decision of a plan and what it was chosen over: data that passes weigh and reports print."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autopar.placement import Spec
from autopar.program import OperatorStrategy, Storage

# An option's cost is that of the fastest stage that has it, all else chosen "anew", or of the plan
# with that option in place of its own, all else "kept".
Rest = Literal["anew", "kept"]


@dataclass(frozen=True)
class Option:
    """One way to decide: a `storage` of a parameter, whose operators then use it as `uses`, or a
    `strategy` of an operator.

    `extra_s` seconds a step more than the fastest option (0: as fast, but for rounding),
    `extra_bytes` per device more than it.
    """

    storage: Storage | None
    uses: tuple[Spec, ...]
    strategy: OperatorStrategy | None
    extra_s: float
    extra_bytes: float


@dataclass(frozen=True)
class Choice:
    """The options of a decision that are worth showing.

    `chosen` is the plan's own, None where the search has no such option; `others` are the best of
    the rest, the fastest first, one of them slower if any is. `n_options` counts all that are
    possible, `n_as_fast` those that are as fast as the fastest. `blocks` of the repeated blocks of
    a stage, of all so many, were weighed: (3, 48); None: the whole stage. What `runs_again` in
    backward is weighed as if it ran once.
    """

    chosen: Option | None
    others: tuple[Option, ...]
    n_options: int
    n_as_fast: int
    rest: Rest
    blocks: tuple[int, int] | None = None
    runs_again: bool = False


@dataclass(frozen=True)
class Decision:
    """What a plan decided of one parameter or operator on one stage.

    `name` is as in the plan; `source` is the user's line of an operator, `read_by` has "key
    (file:line)" of the operators that read a parameter. `choice` is None where a recipe, `recipe`,
    decided.
    """

    name: str
    stage: int
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    source: str
    read_by: tuple[str, ...]
    choice: Choice | None
    recipe: str = ""
