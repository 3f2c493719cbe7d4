"""What a loader says of a batch to `pm.step`: rows of one rank, or a whole batch with padding.

It travels as the item `batch` of the batch, so `pm.step(**batch)` gets it as its option `batch`. A
loop cannot forget it, and the step compares it with what this rank reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from autopar.errors import BatchError


@dataclass
class PaddingRecord:
    """Whether the padding of one loader is known to be exact; its batches share it."""

    is_exact: bool = False


@dataclass(frozen=True)
class Loaded:
    """A batch of a loader, as `pm.step` takes it.

    n_rows     of the global batch, with padding
    rows       path -> (first, after the last) of an input that this rank has; None: all have all
    n_padded   the last rows of a global batch are padding; 0 with `rows`
    """

    n_rows: int
    rows: Mapping[str, tuple[int, int]] | None = None
    n_padded: int = 0
    record: PaddingRecord = field(default_factory=PaddingRecord, repr=False)

    @property
    def is_local(self) -> bool:
        return self.rows is not None

    def to(self, *_args: Any, **_kwargs: Any) -> Self:
        """Itself: loops that move every item of a batch to a device keep it."""
        return self

    cuda = cpu = pin_memory = to


def unwrapped(
    batch: str | Loaded, global_rows: int | None
) -> tuple[Loaded | None, str, int | None]:
    """(what a loader said, the mode, the number of global rows) of a call of `pm.step`."""
    if not isinstance(batch, Loaded):
        return None, batch, global_rows
    if not batch.is_local:
        return batch, "global", global_rows
    return batch, "local", batch.n_rows


def refuse_loaded(given: Mapping[str, Any]) -> None:
    """Raise `BatchError` for rows of one rank, or padded ones, where a whole batch is asked for."""
    mark = given.get("batch")
    if not isinstance(mark, Loaded):
        return
    what = (
        f"this rank's rows of a batch of {mark.n_rows}"
        if mark.is_local
        else f"{mark.n_rows} rows of which {mark.n_padded} are padding"
    )
    raise BatchError(
        f"a loader made this batch for pm.step: it has {what}",
        hint='call pm.eval() before `for batch in loader`, or make the loader with rows="global" '
        "and without pad=: then every rank has the whole batch, without padding",
    )
