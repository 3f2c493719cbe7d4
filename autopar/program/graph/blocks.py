"""Which modules are blocks: what ZeRO-3 gathers at once, and what generated programs loop over.

A block is a child of a list of modules, some of whose children are equal: `transformer.h.3`. The
outermost such list counts. So the blocks of a Swin are `layers.2.blocks.4`: its stages, `layers.2`,
have parameters of different shapes. Outside of such lists a block is a path up to its first number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache


def block_lists(shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """The paths of the lists that have equal children (`transformer.h`).

    `shapes` are those of the model's parameters, by name.
    """
    children: dict[str, dict[str, list[tuple[str, tuple[int, ...]]]]] = defaultdict(dict)
    for name, shape in shapes.items():
        words = name.split(".")
        for i, word in enumerate(words):
            if _is_number(word):
                own = children[".".join(words[:i])].setdefault(word, [])
                own.append((".".join(words[i + 1 :]), shape))
    return frozenset(
        path for path, of in children.items() if len({tuple(own) for own in of.values()}) < len(of)
    )


@lru_cache(maxsize=1 << 14)
def block_of(path: str, lists: frozenset[str] = frozenset()) -> str | None:
    """The block of a module or parameter (`transformer.h.3.attn`); None outside of numbers."""
    words = path.split(".")
    numbers = [i for i, word in enumerate(words) if _is_number(word)]
    in_lists = (i for i in numbers if ".".join(words[:i]) in lists)
    at = next(in_lists, numbers[0] if numbers else None)
    return None if at is None else ".".join(words[: at + 1])


def _is_number(word: str) -> bool:
    """Does Python print a number so? Other digits, as `²` or `01`, are names."""
    return word.isascii() and word.isdigit() and str(int(word[:19])) == word
