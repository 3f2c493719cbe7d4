"""Which names of a plan a user means: whole names, starred ones as reports print them, suffixes.

Names are those of parameters (`transformer.wte.weight`), of modules (`transformer.wte`) and of
operators (`transformer.wte/embedding#0`). The first of these that finds something decides:

    whole     the name itself
    pattern   `*` stands for any number of a module, from the beginning or from a later part on:
              `h.*.mlp.c_fc.weight`, `mlp.c_fc`, `wte`

What is found by a pattern must be one name up to numbers: the same place of equal layers.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from autopar.errors import OptionError
from autopar.program.lines import starred

# Names that an error lists.
_N_LISTED = 8


def matching_names(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """The names that `name` means, in the order of `known` and of the modules around them.

    `known` are parameters and keys of operators.

    Raises `OptionError` if there is none, with near names; or if several differ by more than
    numbers, with all of them.
    """
    names = list(dict.fromkeys(inner for full in known for inner in _around(full)))
    if name in names:
        return (name,)
    pattern = re.compile(r"(?:.*[./])?" + re.escape(name).replace(r"\*", "[0-9]+"))
    found = [full for full in names if pattern.fullmatch(full)]
    kinds = Counter(map(starred, found))
    if not kinds:
        near = _near(name, names)
        raise OptionError(
            f"the plan has no parameter, operator or module {name!r}",
            hint=f"did you mean {' or '.join(near)}?" if near else
            "names are those of model.named_parameters() and the keys in the plan file",
        )  # fmt: skip
    if len(kinds) > 1:
        listed = [f"{kind} ({n})" if n > 1 else kind for kind, n in kinds.most_common(_N_LISTED)]
        more = f" and {len(kinds) - _N_LISTED} more" if len(kinds) > _N_LISTED else ""
        raise OptionError(
            f"{name!r} is of {len(kinds)} parameters, operators or modules: "
            f"{', '.join(listed)}{more}",
            hint="give more of the name, as it is printed here",
        )
    return tuple(found)


def _around(name: str) -> Iterator[str]:
    """The name and the modules around it, the innermost first."""
    yield name
    module, _, operator = name.rpartition("/")
    parts = (module if operator and module else name).split(".")
    if module:
        yield module
    for n in range(len(parts) - 1, 0, -1):
        yield ".".join(parts[:n])


def _near(name: str, names: Iterable[str]) -> list[str]:
    """Up to three names, as they are printed, that look like it, whole or at their end."""
    ends: dict[str, str] = {}
    n_parts = len(re.split(r"[./]", name))
    for full in map(starred, names):
        ends.setdefault(full, full)
        parts = re.split(r"(?<=[./])", full)
        ends.setdefault("".join(parts[-n_parts:]), full)
    close = difflib.get_close_matches(starred(name), ends, n=3, cutoff=0.6)
    return list(dict.fromkeys(ends[end] for end in close))
