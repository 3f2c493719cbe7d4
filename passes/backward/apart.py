"""Divides backward: what other operators wait for, then the gradients of parameters.

A line belongs to the second part if nothing but a parameter's gradient depends on it: the
weight-gradient matmul, the sum of a bias's rows, casts and reductions of both. All others, such as
the input gradient, are the first part. So a stage can send the gradients of what it received before
it computes those of its weights (zero-bubble schedules: Qi et al., "Zero Bubble Pipeline
Parallelism", ICLR 2024).

    backward_input(saved, cotangents, ready, env) -> kept
    backward_weight(kept, ready, env)

Order in each part stays, so every sum adds in the order that it had: all bits stay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autopar.program.lines import (
    FusedReductions,
    GradientMove,
    JointLine,
    KernelLine,
    StartLine,
    WaitLine,
    WeightGradients,
)


def with_weight_gradients_last(
    lines: Sequence[JointLine], of_parameters: Collection[str], of_received: Collection[str]
) -> list[JointLine]:
    """The lines of backward in two parts, with a `WeightGradients` between them.

    `of_parameters` and `of_received` are the gradients that backward hands over.
    """
    readers: dict[str, list[int]] = {}
    for i, line in enumerate(lines):
        for name in line.reads:
            readers.setdefault(name, []).append(i)
    last: set[int] = set()
    for i in range(len(lines) - 1, -1, -1):
        line = lines[i]
        if isinstance(line, KernelLine) and line.is_forward:
            continue
        call = line.move if isinstance(line, StartLine | WaitLine) else line
        if not isinstance(call, KernelLine | GradientMove | FusedReductions):
            continue
        made = line.writes
        users = [k for name in made for k in readers.get(name, ())]
        is_asked = bool(users) or not set(made).isdisjoint(of_parameters)
        is_asked |= isinstance(line, KernelLine)  # one that nobody reads is dropped later
        stays = last.issuperset(users) and all(_stays_in_operator(line, lines[k]) for k in users)
        if is_asked and stays and set(made).isdisjoint(of_received):
            last.add(i)
    first = [line for i, line in enumerate(lines) if i not in last]
    return [*first, WeightGradients(), *(lines[i] for i in sorted(last))]


def _stays_in_operator(line: JointLine, user: JointLine) -> bool:
    """Is the user a kernel of the same operator, a cast, a sum or a reduction of its gradient?"""
    if not (isinstance(line, KernelLine) and isinstance(user, KernelLine)):
        return True
    # Sums have no key, and casts that of a parameter, which has no operator's name.
    return "/" not in user.key or user.key == line.key or not line.key
