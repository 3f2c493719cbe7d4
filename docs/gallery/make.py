"""Write the pages of the gallery: `python -m docs.gallery.make [NAME ...]`.

All take some four minutes. Each page of `docs/gallery/made` has a plan's picture, three sentences
that say why, made of the plan's own figures, and `plan.explain()`. Pictures need Graphviz's `dot`;
without it a page says so, and has the facts alone.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import autopar
from autopar.cost.hardware import load_profile
from autopar.units import format_bytes, format_seconds
from docs.gallery.models import PIECES, Piece
from docs.pictures.draw import rendered

FOLDER = Path(__file__).parent / "made"


@dataclass(frozen=True)
class Planned:
    """A plan on `meta`; `whole_bytes` are weights, gradients and AdamW's state, unsharded."""

    plan: autopar.Plan
    whole_bytes: int
    took_s: float


def planned(piece: Piece) -> Planned:
    begun_s = time.monotonic()
    with torch.device("meta"):
        model, batch, loss_fn = piece.make()
    mesh = autopar.Mesh(piece.mesh, hardware=piece.hardware)
    plan = autopar.plan(model, mesh, batch, loss_fn=loss_fn, **piece.options)
    # Parameters are stored as the model has them, and so are gradients and two moments.
    whole_bytes = sum(4 * p.numel() * p.element_size() for p in model.parameters())
    return Planned(plan, whole_bytes, time.monotonic() - begun_s)


def page(piece: Piece, found: Planned, picture: str | None) -> str:
    """The page in Markdown; `picture` is the name of its file."""
    nodes, devices = piece.mesh
    shown = (
        f"![The plan of {piece.title}]({picture})"
        if picture is not None
        else "The picture needs Graphviz's `dot` (`apt install graphviz`)."
    )
    return f"""# {piece.title}

{piece.about[0].upper()}{piece.about[1:]}, on {nodes} x {devices} {piece.hardware}.

{" ".join(why(piece, found))}

```text
{found.plan.explain()}
```

{shown}
"""


def why(piece: Piece, found: Planned) -> list[str]:
    """Three sentences: what memory asks for, what communication costs, what came second."""
    return [_memory(piece, found), _communication(found.plan), _second(found.plan)]


def _memory(piece: Piece, found: Planned) -> str:
    """What each rank would hold of whole parameters, beside the memory of a device."""
    has = load_profile(piece.hardware).value("device.memory_bytes")
    verdict = "more than" if found.whole_bytes > has else "within"
    whole = format_bytes(found.whole_bytes)
    return (
        f"Whole, weights, gradients and optimizer state would take {whole} on every rank, "
        f"{verdict} the {format_bytes(has)} of a device; the plan's peak is "
        f"{format_bytes(found.plan.predicted.peak_bytes)}."
    )


def _communication(plan: autopar.Plan) -> str:
    """The collectives that move most, and how much compute hides."""
    found = plan.predicted
    moved: dict[tuple[str, str], float] = {}
    for call in plan.collectives():
        key = (call.phase, call.kind)
        moved[key] = moved.get(key, 0.0) + call.count * call.size_bytes
    if not moved:
        return "No rank waits for another."
    (phase, kind), size_bytes = max(moved.items(), key=lambda item: item[1])
    hidden = 1 - min(1.0, found.exposed_comm_s / found.comm_time_s)
    return (
        f"Most bytes are moved by {kind} of {phase}, {format_bytes(size_bytes)} a step and rank; "
        f"of {format_seconds(found.comm_time_s)} of communication in a step of "
        f"{format_seconds(found.step_time_s)}, {hidden:.0%} hides beside compute."
    )


def _second(plan: autopar.Plan) -> str:
    """The next best candidate with a predicted step."""
    best_s = plan.predicted.step_time_s
    others = [
        (row.step_time_s, row.name)
        for row in plan.data.alternatives
        if row.step_time_s is not None and row.name != plan.data.chosen
    ]
    if not others:
        return f"The winner is {plan.data.chosen}; no other candidate fits and may win."
    step_s, name = min(others)
    longer = f"{step_s / best_s - 1:.1%}"
    return f"The winner is {plan.data.chosen}; next is {name}, whose step is {longer} longer."


def make(name: str) -> None:
    """Write the page and the picture of one model."""
    piece = PIECES[name]
    found = planned(piece)
    picture = rendered(found.plan.to_dot())
    if picture is not None:
        (FOLDER / f"{name}.svg").write_text(picture, encoding="utf-8")
    text = page(piece, found, None if picture is None else f"{name}.svg")
    (FOLDER / f"{name}.md").write_text(text, encoding="utf-8")
    print(f"{piece.title}: {found.plan.data.chosen}, in {format_seconds(found.took_s)}", flush=True)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PIECES:
        make(name)


if __name__ == "__main__":
    main()
