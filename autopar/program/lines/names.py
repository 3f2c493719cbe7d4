"""Names of variables in generated programs: readable, and never a word that the file uses. And the
names of equal layers as one (`starred`).

Names come from outside: of parameters, inputs, modules and mesh axes. Each becomes a Python
identifier of ASCII letters, which is what `autopar/codegen` finds variables by.
"""

from __future__ import annotations

import itertools
import keyword
import re
from collections.abc import Collection, Sequence
from functools import cache

from autopar.placement import TABLE, Spec
from autopar.program.lines.variables import UNUSED
from autopar.rules import all_rules

_WORDS = frozenset(
    "torch aten env parameters delivered received saved cotangents ready phase taped taken kept i "
    "range reversed float compiled forward backward prologue backward_input backward_weight".split()
) | {UNUSED}
# What blocks hand on to each other, and to backward (`autopar/codegen/flow.py`).
_HANDED_ON = ("carried", "coming", "gathered", "gradients", "reducing")
_LISTS = frozenset(
    {f"{word}_{n}" for word in ("saved", "parameters", *_HANDED_ON) for n in range(1, 100)}
    | {*_HANDED_ON}
)


# A number that is a whole part of a path.
_NUMBER = re.compile(r"(?<![^./ ])[0-9]+(?=[./])|(?<=\.)[0-9]+(?![^./ ])")


def starred(text: str) -> str:
    """`h.3.mlp.c_fc.weight` -> `h.*.mlp.c_fc.weight`: numbers of modules become `*`."""
    return _NUMBER.sub("*", text)


def identifier(name: str) -> str:
    """`h.0.mlp.c_fc.weight` -> `h_0_mlp_c_fc_weight`."""
    word = re.sub(r"\W", "_", name, flags=re.ASCII)
    return word if word.isidentifier() else f"_{word}"


def free_name(wanted: str, taken: Collection[str]) -> str:
    """`wanted`, or `wanted_2`, `wanted_3`, ... if that is taken."""
    name, n = wanted, 2
    while name in taken:
        name, n = f"{wanted}_{n}", n + 1
    return name


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
    """The variable of a group in generated programs: `tp`, `dp_tp`.

    A group whose name is a word of the file, as `torch`, has a number after it.
    """
    name, words = _joined(axis_names, axes), _words_of_files()
    return free_name(name, words | _group_words(tuple(axis_names))) if name in words else name


def reserved_names(axis_names: Sequence[str]) -> frozenset[str]:
    """Words that no variable may be called: groups, moves, lowered functions, Python's keywords."""
    groups = {group_name(axis_names, axes) for axes in _subsets(range(len(axis_names)))}
    return _words_of_files() | groups


def has_clashing_groups(axis_names: Sequence[str]) -> bool:
    """Have two groups of axes one name? As a_b of the axes `a` and `b`, and the axis `a_b`."""
    subsets = _subsets(range(len(axis_names)))
    return len({_joined(axis_names, axes) for axes in subsets}) < len(subsets)


@cache
def _words_of_files() -> frozenset[str]:
    """The words of any file. Rules that users register bring no functions of this kind."""
    functions = {lowering.function for rule in all_rules() for lowering in rule.lower.values()}
    return _WORDS | _LISTS | set(keyword.kwlist) | set(TABLE) | functions


@cache
def _group_words(axis_names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(_joined(axis_names, axes) for axes in _subsets(range(len(axis_names))))


def _subsets(axes: Sequence[int]) -> list[tuple[int, ...]]:
    return [s for n in range(1, len(axes) + 1) for s in itertools.combinations(axes, n)]


def _joined(axis_names: Sequence[str], axes: Sequence[int]) -> str:
    return "_".join(axis_names[a] for a in axes)
