"""A ledger of live bytes: what is held at the moment, and the peak so far."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

# A storage: its kind and its owner in the ledger.
StorageId = tuple[str, str]


@dataclass
class Moment:
    """Storages are made, bytes are counted if the moment has a text, others are made, some end.

    `work` is the number of its work in the order of forward or backward.
    """

    text: str = ""
    workspace_bytes: float = 0.0
    work: int = 0
    made: list[tuple[StorageId, float]] = field(default_factory=list)
    made_after: list[tuple[StorageId, float]] = field(default_factory=list)
    ended: list[StorageId] = field(default_factory=list)


@dataclass(frozen=True)
class LedgerState:
    """The peak and the held bytes before a block that is simulated once for several equal ones."""

    peak_bytes: float
    at: str
    parts: dict[str, float]
    held: dict[str, dict[str, float]]


@dataclass
class Ledger:
    """Live bytes by kind and owner, and the peak so far: its bytes, where it is, bytes by kind."""

    held: dict[str, dict[str, float]] = field(default_factory=dict)
    live_bytes: float = 0.0
    peak_bytes: float = 0.0
    at: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    is_paused: bool = False

    def add(self, kind: str, owner: str, size_bytes: float) -> None:
        entries = self.held.setdefault(kind, {})
        entries[owner] = entries.get(owner, 0.0) + size_bytes
        self.live_bytes += size_bytes

    def drop(self, kind: str, owner: str) -> float:
        size_bytes = self.held.get(kind, {}).pop(owner, 0.0)
        self.live_bytes -= size_bytes
        return size_bytes

    def has(self, kind: str, owner: str) -> bool:
        return owner in self.held.get(kind, {})

    def clear(self, kind: str) -> None:
        for owner in list(self.held.get(kind, {})):
            self.drop(kind, owner)

    def mark(self, at: str, workspace_bytes: float = 0.0) -> None:
        """Record this moment, with its workspace, if it is a new peak and marking is not paused."""
        if self.is_paused or self.live_bytes + workspace_bytes <= self.peak_bytes:
            return
        self.peak_bytes, self.at = self.live_bytes + workspace_bytes, at
        self.parts = {kind: sum(entries.values()) for kind, entries in self.held.items()}
        self.parts["workspace"] = workspace_bytes

    def before_block(self) -> LedgerState:
        """Start a block; until `repeat`, the peak is that of this block alone."""
        held = {kind: dict(entries) for kind, entries in self.held.items()}
        found = LedgerState(self.peak_bytes, self.at, self.parts, held)
        self.peak_bytes = -1.0
        return found

    def repeat(self, before: LedgerState, n: int, lasting: Collection[str]) -> None:
        """Extend the block since `before` to `n` equal blocks.

        Every block changes the held bytes by the same amount, so live bytes are linear in the
        number of blocks, and the peak is in the first or the last block. Bytes of `lasting` kinds
        that other blocks leave go to the owners that the first block made.
        """
        changed = {
            kind: sum(entries.values()) - sum(before.held.get(kind, {}).values())
            for kind, entries in self.held.items()
        }
        others_bytes = (n - 1) * sum(changed.values())
        if self.peak_bytes >= 0.0 and others_bytes > 0.0:
            self.peak_bytes += others_bytes
            for kind, size_bytes in changed.items():
                self.parts[kind] = self.parts.get(kind, 0.0) + (n - 1) * size_bytes
        if self.peak_bytes <= before.peak_bytes:
            self.peak_bytes, self.at, self.parts = before.peak_bytes, before.at, before.parts
        for kind, size_bytes in changed.items():
            if kind not in lasting:
                self.add(kind, "other blocks", (n - 1) * size_bytes)
                continue
            was = before.held.get(kind, {})
            for owner in [owner for owner in self.held[kind] if owner not in was]:
                self.add(kind, owner, (n - 1) * self.held[kind][owner])
