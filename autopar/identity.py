"""Keys that tell objects apart by which they are, not by what they hold."""

from __future__ import annotations


class Same:
    """A key for one object: equal to another only if both hold the same object.

    It keeps the object, so no later object can take its place in a cache.
    """

    __slots__ = ("_held",)

    def __init__(self, held: object) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._held is other._held

    def __hash__(self) -> int:
        return id(self._held)
