"""How much there was to choose from, and how much of it was looked at: what planning prints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlanningStats:
    """Counts of one planning.

    n_written_out      choice variables of the largest problem solved, all copies of blocks written
                       out
    n_variables        those that were solved for: one block stands for its copies
    n_configurations   stages in the tables of the joint search and of its bounds: ranges of
                       layers x placements on a view x numbers of microbatches
    n_solved           stages and whole programs that were solved
    """

    n_written_out: int = 0
    n_variables: int = 0
    n_configurations: int = 0
    n_solved: int = 0
