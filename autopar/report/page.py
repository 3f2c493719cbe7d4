"""What HTML pages share: their style, and tables of escaped text.

A page loads nothing: style and pictures are inline. It is well-formed XML, so any parser can read
it. Names come from the user's model, so all text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.report.boxes import escaped

_STYLE = """
body { font: 15px/1.45 Helvetica, Arial, sans-serif; margin: 2em auto; max-width: 76em;
       padding: 0 1.5em; color: #1c2024; }
h1 { font-size: 1.5em; margin-bottom: 0.2em; } h2 { font-size: 1.15em; margin-top: 1.8em; }
table { border-collapse: collapse; } caption { text-align: left; color: #555; white-space: nowrap; }
th, td { padding: 0.2em 0.9em 0.2em 0; text-align: left; vertical-align: top; }
th { border-bottom: 1px solid #9aa5b1; } td.n, th.n { text-align: right; }
td { border-bottom: 1px solid #eceff2; font-variant-numeric: tabular-nums; }
tr.chosen td { font-weight: bold; background: #eef2f7; }
.picture { overflow-x: auto; } .picture svg { max-width: 100%; height: auto; }
.note { background: #fff6da; padding: 0.5em 0.8em; }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page; `parts` are HTML."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f"<title>{escaped(title)}</title>\n<style>{_STYLE}</style>\n"
        "</head>\n<body>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def html_table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    marked: Sequence[int] = (),
) -> str:
    """A table of escaped cells; a head that starts with `#` marks a column of numbers."""
    classes = [' class="n"' if head.startswith("#") else "" for head in heads]

    def row(cells: Sequence[str], tag: str, style: str = "") -> str:
        inner = (f"<{tag}{c}>{escaped(t)}</{tag}>" for c, t in zip(classes, cells, strict=True))
        return f"<tr{style}>{''.join(inner)}</tr>"

    lines = [row([head.removeprefix("#") for head in heads], "th")]
    lines += [
        row(cells, "td", ' class="chosen"' if i in marked else "") for i, cells in enumerate(rows)
    ]
    above = f"<caption>{escaped(caption)}</caption>\n" if caption else ""
    return f"<table>\n{above}" + "\n".join(lines) + "\n</table>"
