"""Facts of a whole program that many ask for: computed once for each program (`once`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

Subject = TypeVar("Subject")
Fact = TypeVar("Fact")


def once(function: Callable[[Subject], Fact]) -> Callable[[Subject], Fact]:
    """Keep the result of a function with the program, as `cached_property` does for its own."""
    key = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def found(program: Subject) -> Fact:
        known = vars(program)
        if key not in known:
            known[key] = function(program)
        fact: Fact = known[key]
        return fact

    return found
