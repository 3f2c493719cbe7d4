"""Results of methods that are kept as long as their object: `cached_property` with arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def cached_method(method: F) -> F:
    """A method that runs once for the same arguments, which are positional and hashable.

    Results lie in the `__dict__` of the object, also of a frozen dataclass. So they are gone with
    the object, and `dataclasses.replace` starts without them.
    """
    name = f"_results_of_{method.__name__}"

    @wraps(method)
    def once(self: Any, *args: Any) -> Any:
        results = self.__dict__.setdefault(name, {})
        if args not in results:
            results[args] = method(self, *args)
        return results[args]

    return cast(F, once)
