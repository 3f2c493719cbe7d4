"""Results that are kept as long as their object: `cached_property` for functions and arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def once(function: F) -> F:
    """A method, or a function of an object, that runs once for each object and the same arguments.

    Arguments after the object are positional and hashable. Results lie in the `__dict__` of the
    object, also of a frozen dataclass. So they are gone with the object, and `dataclasses.replace`
    starts without them.
    """
    key = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def result(subject: Any, *args: Any) -> Any:
        results = vars(subject).setdefault(key, {})
        if args not in results:
            results[args] = function(subject, *args)
        return results[args]

    return cast(F, result)
