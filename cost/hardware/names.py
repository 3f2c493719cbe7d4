"""Names of devices as people write them, and which known names are near one.

Two names are one spelling if their letters and digits are equal: "RTX 4090" is rtx-4090. Less does
not do, because an L40 is no L40S. What is only near is suggested, and never taken.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

_MOST_NEAR, _ALIKE = 4, 0.7


def spelling_of(name: str) -> str:
    """The letters and digits of a name, in lower case."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def near_names(given: str, known: Mapping[str, Sequence[str]]) -> list[str]:
    """The known names, each with its spellings, that `given` may mean, the likeliest first.

    Near is a spelling that contains the given one ("a100" in a100-80gb), a name whose model is in
    the given one ("h100" of h100-sxm in "H100-SXM5"), or one with nearly the same letters.
    """
    wanted = spelling_of(given)
    if len(wanted) < 2:
        return []
    ranks = {}
    for name, spellings in known.items():
        alike = max(difflib.SequenceMatcher(None, wanted, s).ratio() for s in spellings)
        contained = any(wanted in s for s in spellings) or _model(name) in wanted
        if contained or alike >= _ALIKE:
            ranks[name] = (not contained, -alike)
    return sorted(ranks, key=ranks.__getitem__)[:_MOST_NEAR]


def _model(name: str) -> str:
    """The part of a name that says which device it is: the first with a digit."""
    parts = re.split(r"[^a-z0-9]", name.lower())
    return next((part for part in parts if any(map(str.isdigit, part))), spelling_of(name))
