"""The notes of all ranks in words: where each is, and which ranks the others wait for.

Ranks of one stage make the same calls. So those that have made fewer calls of a step are behind. If
all ranks are in one call, that call does not end:

    rank 1 is behind the others
      rank 0: step 7, stage 0, action 0B2, all_reduce over dp of 64 B at stage_0.py:214, since 3.2 s
      rank 1: after 6 steps, since 3.4 s; its process is stopped

What the system says of a process is added on the host where it runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from autopar.runtime.flight.record import HOST, N_NOTES, SLOT_BYTES, TOGETHER, Note
from autopar.units import format_ranks

_STATES = {
    "T": "; its process is stopped",
    "t": "; a debugger has stopped its process",
    "D": "; its process waits for a disk or a device",
    "Z": "; its process has ended",
    "X": "; its process has ended",
}
_TEXTS = ("action", "call", "line", "raised", "host")
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
    """For how long ranks have been stuck: seconds.

    That is the time since the last note of a rank that is in a step, the longest of all ranks. Of
    a call of all ranks besides a step (a save), one rank may wait while another writes. So there it
    is the time since the last note of any rank.
    """
    last = [of[-1] for of in notes.values() if of]
    stuck = [n for n in last if n["action"] is not None and n["raised"] is None]
    in_step = [now_s - n["time_s"] for n in stuck if n["action"] != TOGETHER]
    if len(in_step) < len(stuck):
        in_step.append(now_s - max(n["time_s"] for n in last))
    return max(in_step, default=0.0)


def diagnosis(
    notes: Mapping[int, Sequence[Note]], n_ranks: int, now_s: float, processes: bool = True
) -> str:
    """Which ranks are behind, then a line for each rank.

    processes   say what the system says of their processes; not if we have ended them
    """
    last = {rank: of[-1] for rank, of in notes.items() if of}
    lines = [
        f"{format_ranks(behind)} {'is' if len(behind) == 1 else 'are'} behind the others"
        for behind in _behind(last)
    ]
    if _are_in_one_call(last, n_ranks):
        lines.append("all ranks are in the same call: one has died in it, or a link is down")
    for rank in range(n_ranks):
        text = "has noted nothing"
        if rank in last:
            text = _text(last[rank], now_s) + (_process_state(last[rank]) if processes else "")
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


def _process_state(note: Note) -> str:
    """What is unusual about a process of this host, from proc(5)."""
    if note.get("host") != HOST or not Path("/proc/self/stat").exists():
        return ""
    try:
        state = Path(f"/proc/{note['pid']}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        state = "X"
    return _STATES.get(state, "")


def _are_in_one_call(last: Mapping[int, Note], n_ranks: int) -> bool:
    calls = {
        tuple(note[k] for k in ("step", "stage", "action", "calls", "call"))
        for note in last.values()
    }
    is_in_call = all(note["action"] and note["call"] for note in last.values())
    return len(last) == n_ranks > 1 and len(calls) == 1 and is_in_call


def _text(note: Note, now_s: float) -> str:
    since = f"since {max(now_s - note['time_s'], 0.0):.1f} s"
    call, raised = note["call"] or "", f"raised {note['raised']}" if note["raised"] else ""
    if note["action"] is None:
        return ", ".join(x for x in (f"after {note['step']} steps", call, since) if x)
    at = f" at {note['line']}" if note["line"] else ""
    place = f"step {note['step']}, stage {note['stage']}, action {note['action']}"
    if note["action"] in ("meet", TOGETHER):
        place = f"after {note['step']} steps"
    return ", ".join(x for x in (place, f"{call}{at}" if call else "", raised, since) if x)


def _is_note(note: object) -> bool:
    """Is it a note? The folder may hold files that others wrote."""
    if not isinstance(note, dict):
        return False
    numbers = all(isinstance(note.get(key), int) for key in ("n", "step", "calls", "pid"))
    texts = all(isinstance(note.get(key), str | None) for key in _TEXTS)
    return numbers and texts and isinstance(note.get("time_s"), float) and "stage" in note
