"""The order of forwards and backwards on each stage.

    gpipe    all forwards, then all backwards                          in flight m
    1f1b     stage i runs min(m, n - i) forwards, then one backward    in flight min(m, n - i)
             and one forward in turn, then the backwards that are left

Both run backwards in the order of the forwards, so that gradients add up in the same order.
With m <= n - i, stage i has no forwards left after the first ones, and the same list under both.

Sources: GPipe, Huang et al. 2019; PipeDream-Flush, Narayanan et al. 2021 (arXiv 2104.04473,
figure 4).
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.errors import OptionError
from autopar.schedule.actions import Action, Schedule


def gpipe(n_stages: int, n_microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    return _with_first(n_stages, n_microbatches, lambda stage: n_microbatches)


def one_f_one_b(n_stages: int, n_microbatches: int) -> Schedule:
    """A backward as soon as there can be one; at most n - i microbatches live on stage i."""
    return _with_first(n_stages, n_microbatches, lambda stage: n_stages - stage)


def forward_only(n_stages: int, n_microbatches: int) -> Schedule:
    """Forwards alone: evaluation."""
    _check_counts(n_stages, n_microbatches)
    stages = tuple(
        tuple(Action("forward", stage, k) for k in range(n_microbatches))
        for stage in range(n_stages)
    )
    return Schedule(stages, n_microbatches, trains=False)


# By the words of the option `schedule`.
ORDERS: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def _with_first(n_stages: int, n_microbatches: int, first: Callable[[int], int]) -> Schedule:
    """`first(stage)` forwards, then a backward and a forward in turn while there are both."""
    _check_counts(n_stages, n_microbatches)
    stages = []
    for stage in range(n_stages):
        n_first = min(n_microbatches, first(stage))
        actions = [Action("forward", stage, k) for k in range(n_first)]
        for k in range(n_microbatches):
            actions.append(Action("backward", stage, k))
            if n_first + k < n_microbatches:
                actions.append(Action("forward", stage, n_first + k))
        stages.append(tuple(actions))
    return Schedule(tuple(stages), n_microbatches)


def _check_counts(n_stages: int, n_microbatches: int) -> None:
    if n_stages < 1 or n_microbatches < 1:
        raise OptionError(
            f"a schedule needs at least one stage and one microbatch, not {n_stages} and "
            f"{n_microbatches}"
        )
