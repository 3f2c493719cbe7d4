"""Names of variables in generated programs: readable, and never a word that the file uses."""

from __future__ import annotations

import itertools
import keyword
import re
from collections.abc import Sequence

from autopar.placement import TABLE, Spec
from autopar.program import UNUSED
from autopar.rules import all_rules

_WORDS = frozenset(
    "torch env parameters delivered received saved cotangents ready phase taped forward backward "
    f"prologue backward_input backward_weight kept aten i range reversed {UNUSED}".split()
)
# What blocks hand on to each other, and to backward (`autopar/codegen/flow.py`).
_HANDED_ON = ("carried", "coming", "gathered", "gradients", "reducing")
_LISTS = frozenset(
    {f"{word}_{n}" for word in ("saved", *_HANDED_ON) for n in range(1, 100)} | {*_HANDED_ON}
)


def identifier(name: str) -> str:
    """`h.0.mlp.c_fc.weight` -> `h_0_mlp_c_fc_weight`."""
    word = re.sub(r"\W", "_", name)
    return f"_{word}" if word[0].isdigit() else word


def suffix(spec: Spec, active: Sequence[int]) -> str:
    """A spec as part of a variable's name: `R`, `S0`, `S2_1`."""
    words = []
    for axis in active:
        p = spec.placements[axis]
        words.append(
            (f"S{p.dim}_{p.factor}" if p.factor else f"S{p.dim}") if p.is_shard else p.kind
        )
    return "".join(words) + ("o" if spec.order else "")


def group_name(axis_names: Sequence[str], axes: Sequence[int]) -> str:
    """The variable of a group in generated programs: `tp`, `dp_tp`."""
    return "_".join(axis_names[a] for a in axes)


def reserved_names(axis_names: Sequence[str]) -> frozenset[str]:
    """Words that no variable may be called: groups, moves, lowered functions, Python's keywords."""
    n_axes = range(1, len(axis_names) + 1)
    subsets = (s for n in n_axes for s in itertools.combinations(range(len(axis_names)), n))
    groups = {group_name(axis_names, axes) for axes in subsets}
    functions = {lowering.function for rule in all_rules() for lowering in rule.lower.values()}
    return _WORDS | _LISTS | groups | set(TABLE) | functions | set(keyword.kwlist)
