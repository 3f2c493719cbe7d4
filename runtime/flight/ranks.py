"""The notes of all ranks in words: where each is, and which ranks the others wait for.

Ranks of one stage make the same calls. So those that have made fewer calls of a step are behind. If
all ranks are in one call, that call does not end:

    rank 1 is behind the others
      rank 0: step 7, stage 0, action 0B2, all_reduce over dp of 64 B at stage_0.py:214, since 3.2 s
      rank 1: after 6 steps, since 3.4 s
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from autopar.runtime.flight.record import N_NOTES, SLOT_BYTES, Note
from autopar.units import format_ranks

_NAME = re.compile(r"rank-(\d+)\.ring")


def read_notes(folder: Path) -> dict[int, list[Note]]:
    """Rank -> its notes, oldest first. What a rank was writing when it died is left out."""
    found: dict[int, list[Note]] = {}
    for path in sorted(folder.glob("rank-*.ring")):
        name = _NAME.fullmatch(path.name)
        if name is None:
            continue
        data, notes = path.read_bytes()[: N_NOTES * SLOT_BYTES], list[Note]()
        for at in range(0, len(data), SLOT_BYTES):
            try:
                note = json.loads(data[at : at + SLOT_BYTES].strip(b"\0 \n") or b"null")
            except ValueError:
                continue
            if _is_note(note):
                notes.append(note)
        found[int(name[1])] = sorted(notes, key=lambda note: int(note["n"]))
    return found


def longest_step_s(notes: Mapping[int, Sequence[Note]], now_s: float) -> float:
    """Seconds since the last note of a rank that is in a step: the longest of all ranks."""
    last = [of[-1] for of in notes.values() if of]
    return max((now_s - n["time_s"] for n in last if n["action"] is not None), default=0.0)


def diagnosis(notes: Mapping[int, Sequence[Note]], n_ranks: int, now_s: float) -> str:
    """Which ranks are behind, then a line for each rank."""
    last = {rank: of[-1] for rank, of in notes.items() if of}
    lines = [
        f"{format_ranks(behind)} {'is' if len(behind) == 1 else 'are'} behind the others"
        for behind in _behind(last)
    ]
    if _are_in_one_call(last, n_ranks):
        lines.append("all ranks are in the same call: one has died in it, or a link is down")
    for rank in range(n_ranks):
        text = _text(last[rank], now_s) if rank in last else "has noted nothing"
        lines.append(f"  rank {rank}: {text}")
    return "\n".join(lines)


def _behind(last: Mapping[int, Note]) -> list[list[int]]:
    """The ranks that made fewer calls than others of their stage; a list for each stage."""
    stages: dict[int | None, dict[int, tuple[int, int]]] = {}
    for rank, note in last.items():
        stages.setdefault(note["stage"], {})[rank] = note["step"], note["calls"]
    found = []
    for progress in stages.values():
        most = max(progress.values())
        if slow := [rank for rank, made in progress.items() if made < most]:
            found.append(slow)
    return found


def _are_in_one_call(last: Mapping[int, Note], n_ranks: int) -> bool:
    calls = {
        tuple(note[k] for k in ("step", "stage", "action", "calls", "call"))
        for note in last.values()
    }
    is_in_call = all(note["action"] and note["call"] for note in last.values())
    return len(last) == n_ranks > 1 and len(calls) == 1 and is_in_call


def _text(note: Note, now_s: float) -> str:
    since = f"since {max(now_s - note['time_s'], 0.0):.1f} s"
    call = note["call"] or ""
    if note["action"] is None:
        return ", ".join(x for x in (f"after {note['step']} steps", call, since) if x)
    at = f" at {note['line']}" if note["line"] else ""
    place = f"step {note['step']}, stage {note['stage']}, action {note['action']}"
    if note["action"] == "meet":
        place = f"after {note['step']} steps"
    return ", ".join(x for x in (place, f"{call}{at}" if call else "", since) if x)


def _is_note(note: object) -> bool:
    """Is it a note? The folder may hold files that others wrote."""
    if not isinstance(note, dict):
        return False
    numbers = all(isinstance(note.get(key), int) for key in ("n", "step", "calls"))
    texts = all(isinstance(note.get(k), str | None) for k in ("action", "call", "line"))
    return numbers and texts and isinstance(note.get("time_s"), float) and "stage" in note
