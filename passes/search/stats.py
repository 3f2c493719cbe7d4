"""Statistics of planning: how large the choice was, and how much of it was solved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlanningStats:
    """Statistics of one planning.

    n_written_out      variables of the largest problem solved, counting every copy of a block
    n_variables        variables of that problem as solved, with one block for its copies
    n_configurations   stages that pipelines were searched of: ranges of layers x views x numbers
                       of microbatches
    n_solved           stages and whole programs that were solved
    """

    n_written_out: int = 0
    n_variables: int = 0
    n_configurations: int = 0
    n_solved: int = 0
