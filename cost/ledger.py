"""A ledger of live bytes: what is held, and the most there ever was."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Live bytes by kind and owner, and the peak so far."""

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
        """This moment, with temporaries, may be the peak; not while the ledger is paused."""
        if self.is_paused or self.live_bytes + workspace_bytes <= self.peak_bytes:
            return
        self.peak_bytes, self.at = self.live_bytes + workspace_bytes, at
        self.parts = {kind: sum(entries.values()) for kind, entries in self.held.items()}
        self.parts["workspace"] = workspace_bytes
