"""Collects what capture notices on its way, for the program's audit (`program/graph/audit.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.program.graph import Audit, Note


@dataclass
class Findings:
    """The notes of one capture so far. Equal notes are kept once."""

    frozen: dict[Note, None] = field(default_factory=dict)
    kept: dict[Note, None] = field(default_factory=dict)
    replaced: dict[Note, None] = field(default_factory=dict)
    refused: dict[Note, None] = field(default_factory=dict)

    def audit(self) -> Audit:
        return Audit(
            tuple(self.frozen), tuple(self.kept), tuple(self.replaced), tuple(self.refused)
        )

    def add(
        self, kind: str, what: str, why: str = "", where: str | None = None, routine: bool = False
    ) -> None:
        """Add a note; `kind` is the name of one of the fields."""
        getattr(self, kind)[Note(what, why, where, routine)] = None
