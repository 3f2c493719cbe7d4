"""Pins: how `force` fixes the placements of single parameters.

    pin = [storage] ["->" use] "@" axis        "S(0)@1"   "S(0)->R@dp"   "->S(1)@tp"

A parameter is stored as `I` or `S(d)` and used as `R`, `I` or `S(d)`. The axis is an index or a
name of the logical mesh. The planner chooses a side that is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import OptionError
from autopar.placement.spec import Placement


@dataclass(frozen=True)
class Pin:
    """How `parameter` must be stored and used on one logical axis; None: the planner chooses."""

    parameter: str
    storage: Placement | None
    use: Placement | None
    axis: int | str

    def __str__(self) -> str:
        """The text that `parse` reads."""
        storage = "" if self.storage is None else str(self.storage)
        use = "" if self.use is None else f"->{self.use}"
        return f"{storage}{use}@{self.axis}"

    @property
    def shards(self) -> bool:
        """Whether it asks for shards, which an axis of one rank cannot give."""
        return any(side is not None and side.is_shard for side in (self.storage, self.use))

    @staticmethod
    def parse(parameter: str, text: str) -> Pin:
        """The inverse of `str`.

        Raises `OptionError` for other text, and for a placement that a parameter cannot have.
        """
        where = f"force[{parameter!r}]"
        placements, at, axis = (part.strip() for part in text.rpartition("@"))
        storage, arrow, use = (part.strip() for part in placements.partition("->"))
        if not at or not placements or (arrow and not use) or not _is_axis(axis):
            raise OptionError(
                f"{text!r} is not a pin",
                where=where,
                hint='write "S(0)@1", "S(0)->R@0" or "->S(1)@tp": storage->use@axis',
            )
        return Pin(
            parameter,
            _side(where, "stored", storage, ("I", "S")),
            _side(where, "used", use, ("R", "I", "S")),
            int(axis) if axis.isdigit() else axis,
        )

    def axis_index(self, names: Sequence[str]) -> int:
        """Index of the axis in a logical mesh; raises `OptionError` if the mesh lacks it."""
        if isinstance(self.axis, int) and self.axis < len(names):
            return self.axis
        if self.axis in names:
            return list(names).index(str(self.axis))
        raise OptionError(
            f"there is no axis {self.axis}: the logical mesh has "
            + ", ".join(f"{i} ({name})" for i, name in enumerate(names)),
            where=f"force[{self.parameter!r}] = {str(self)!r}",
            hint='mesh_shape="as-given" keeps the axes of the mesh',
        )


def parse_pins(value: Any) -> tuple[Pin, ...]:
    """The pins of `force={parameter: text or list of texts}`; raises `OptionError`."""
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise OptionError(
            f"force maps parameter names to pins, not {value!r}",
            hint='force={"h.0.mlp.c_fc.weight": "S(0)@1"}',
        )
    pins: dict[tuple[str, int | str], Pin] = {}
    for parameter, texts in value.items():
        if not isinstance(parameter, str):
            raise OptionError(f"force is keyed by parameter names, not {parameter!r}")
        for pin in _pins_of(parameter, texts):
            if (parameter, pin.axis) in pins:
                raise OptionError(
                    f"axis {pin.axis} is pinned twice: {pins[parameter, pin.axis]} and {pin}",
                    where=f"force[{parameter!r}]",
                )
            pins[parameter, pin.axis] = pin
    return tuple(pins.values())


def _pins_of(parameter: str, texts: Any) -> list[Pin]:
    items = [texts] if isinstance(texts, str) else texts
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise OptionError(
            f"a pin is a text, or a list of texts, not {texts!r}", where=f"force[{parameter!r}]"
        )
    words = [word for item in items for word in item.split(";") if word.strip()]
    if not words:
        raise OptionError(
            f"{texts!r} pins nothing",
            where=f"force[{parameter!r}]",
            hint="leave the parameter out to let the planner choose",
        )
    return [Pin.parse(parameter, word.strip()) for word in words]


def _side(where: str, verb: str, text: str, kinds: Sequence[str]) -> Placement | None:
    """One side of a pin: a placement of one of `kinds`, or None if the text is empty."""
    if not text:
        return None
    allowed = " or ".join("S(dim)" if kind == "S" else kind for kind in kinds)
    try:
        placement = Placement.parse(text)
    except OptionError as error:
        raise OptionError(
            f"{text!r} is not a placement", where=where, hint=f"use {allowed}; S(dim.factor) too"
        ) from error
    if placement.kind not in kinds:
        raise OptionError(f"a parameter is {verb} {allowed}, not {text}", where=where)
    return placement


def _is_axis(text: str) -> bool:
    return (text.isascii() and text.isdigit()) or text.isidentifier()
