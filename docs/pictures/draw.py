"""Draw the pictures of the documents: `python -m docs.pictures.draw`, or `make docs`.

    placement-r, -i, -s, -p.svg   what two ranks hold of a tensor
    megatron-mlp.svg              placements through an MLP on two tensor-parallel ranks
    mlp.svg                       `plan.to_dot()` of `examples/demo.py` in Megatron's layout, drawn
                                  by Graphviz's `dot`; line one has the hash of the DOT text

A test fails where one is stale. The first two kinds are the same bytes everywhere. How `dot` lays
boxes out depends on its version, so of the last only the hash is compared.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import autopar
from examples.demo import mlp

FOLDER = Path(__file__).parent
PLAN = FOLDER / "mlp.svg"
WHOLE, SHARD, PARTIAL = "#e4e4e4", "#a9cdf5", "#f4b0a6"
_INK = "#333333"


def plan_dot() -> str:
    """The two-layer MLP on two by two devices, as DOT."""
    model, batch = mlp()
    mesh = autopar.Mesh((1, 4), hardware="a100-80gb")
    return autopar.plan(model, mesh, batch, manual=autopar.Manual(dp=2, tp=2)).to_dot()


def mark(dot: str) -> str:
    """A comment that says from which DOT text a picture was made."""
    return f"<!-- made from DOT text of SHA-256 {hashlib.sha256(dot.encode()).hexdigest()} -->"


def rendered(dot: str) -> str | None:
    """The SVG of a DOT text; None where the program `dot` is not installed."""
    program = shutil.which("dot")
    if program is None:
        return None
    ran = subprocess.run([program, "-Tsvg"], input=dot, capture_output=True, text=True, check=True)
    return ran.stdout[ran.stdout.index("<svg") :]


def box(x: int, y: int, width: int, height: int, fill: str, text: str = "", dash: str = "") -> str:
    """A rectangle with a text in it."""
    style = f' stroke-dasharray="{dash}"' if dash else ""
    label = words(x + width / 2, y + height / 2 + 4, text) if text else ""
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" '
        f'stroke="{_INK}"{style}/>{label}'
    )


def words(x: float, y: float, text: str, size: int = 12, anchor: str = "middle") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{_INK}">{text}</text>'
    )


def arrow(x1: int, y1: int, x2: int, y2: int, color: str = _INK) -> str:
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}" stroke-width="1.5" '
        'marker-end="url(#tip)"/>'
    )


def svg(width: int, height: int, parts: Sequence[str]) -> str:
    """A picture on white, so that it reads on dark pages too."""
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{_INK}"/></marker>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif">',
            f"<defs>{tip}</defs>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


def placement(kind: str) -> str:
    """A tensor of two rows on two ranks."""
    parts = []
    for rank in (0, 1):
        x = 8 + 82 * rank
        parts.append(words(x + 34, 14, f"rank {rank}", 10))
        if kind == "s":
            for row in (0, 1):
                own = row == rank
                fill, text = (SHARD, "ab"[row]) if own else ("none", "")
                parts.append(box(x, 20 + 22 * row, 68, 22, fill, text, "" if own else "3 3"))
        elif kind == "p":
            for row in (0, 1):
                parts.append(box(x, 20 + 22 * row, 68, 22, PARTIAL, f"{'ab'[row]}{'₀₁'[rank]}"))
        else:
            for row in (0, 1):
                parts.append(box(x, 20 + 22 * row, 68, 22, WHOLE, "ab"[row]))
    note = {
        "r": "other work on each rank", "i": "the same work on each rank",
        "s": "a piece each", "p": "a = a₀ + a₁, b = b₀ + b₁",
    }  # fmt: skip
    return svg(166, 84, [*parts, words(83, 79, note[kind], 10)])


def megatron_mlp() -> str:
    """x, f, up, relu, down, g, y on two tensor-parallel ranks."""
    columns = (
        (60, "x", "I", WHOLE, WHOLE), (200, "x · up", "S(1)", SHARD, ""),
        (340, "relu", "S(1)", SHARD, ""), (480, "· down", "P", PARTIAL, PARTIAL),
        (620, "y", "I", WHOLE, WHOLE),
    )  # fmt: skip
    parts = [words(8, 66, "rank 0", 11, "start"), words(8, 146, "rank 1", 11, "start")]
    for x, title, where, fill, other in columns:
        parts.append(words(x + 30, 18, title, 13))
        for rank, y in ((0, 40), (1, 120)):
            for half in (0, 1):
                own = bool(other) or half == rank
                parts.append(
                    box(x + 30 * half, y, 30, 44, fill if own else "none", "", "" if own else "3 3")
                )
        parts.append(words(x + 30, 184, where, 13))
    for x, _, _, _, _ in columns[:-1]:
        parts += [arrow(x + 64, y, x + 134, y) for y in (62, 142)]
    parts += [words(162, 106, "f", 13), words(582, 106, "g: all_reduce", 13)]
    parts.append(words(162, 202, "backward: all_reduce", 11))
    parts.append(words(582, 202, "backward: nothing", 11))
    return svg(700, 214, parts)


def pictures() -> dict[str, str]:
    """File name -> SVG, of those that are drawn here."""
    found = {f"placement-{kind}.svg": placement(kind) for kind in "risp"}
    return found | {"megatron-mlp.svg": megatron_mlp()}


def main() -> None:
    for name, text in pictures().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    dot = plan_dot()
    if PLAN.exists() and PLAN.read_text(encoding="utf-8").startswith(mark(dot)):
        return
    drawn = rendered(dot)
    if drawn is None:
        sys.exit(f"{PLAN} is stale, and needs Graphviz's dot (apt install graphviz)")
    PLAN.write_text(f"{mark(dot)}\n{drawn}", encoding="utf-8")


if __name__ == "__main__":
    main()
