"""What capture made of the user's module: frozen, kept, replaced or refused.

frozen      Python values that the trace read, which the graph holds as constants
kept        what runs as the user wrote it, although it is no plain operator
replaced    what another form of the same computation stands for
refused     what does not run; capture raises for whatever would change training
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Kind -> its name in text, and what that means.
_KINDS = {
    "frozen": ("read as constants", "Python values in the graph"),
    "kept": ("kept", "run as written"),
    "replaced": ("replaced", "run in an equal form"),
    "refused": ("refused", "not run"),
}
_N_SHORT = 3


@dataclass(frozen=True)
class Note:
    """One finding: what it is, what was made of it, and the user's `file:line` if known.

    A `routine` finding (the `eps` of torch's own norms) is in the full text only.
    """

    what: str
    why: str = ""
    where: str | None = None
    routine: bool = False

    def __str__(self) -> str:
        text = f"{self.what}: {self.why}" if self.why else self.what
        return f"{text} ({self.where})" if self.where else text


@dataclass(frozen=True)
class Audit:
    """All findings of one capture, in the order of the trace."""

    frozen: tuple[Note, ...] = ()
    kept: tuple[Note, ...] = ()
    replaced: tuple[Note, ...] = ()
    refused: tuple[Note, ...] = ()

    def text(self, full: bool = False) -> str:
        """A line for each kind that has findings, with the first few; all of them if `full`."""
        lines: list[str] = []
        for kind, (name, meaning) in _KINDS.items():
            notes: Sequence[Note] = getattr(self, kind)
            if not full:
                notes = [note for note in notes if not note.routine]
            if not notes:
                continue
            if full:
                lines += [f"{name} ({meaning}):", *(f"  {note}" for note in notes)]
            else:
                first = ", ".join(note.what for note in notes[:_N_SHORT])
                more = f" and {len(notes) - _N_SHORT} more" if len(notes) > _N_SHORT else ""
                lines.append(f"{name}: {first}{more}")
        return "\n".join(lines)
