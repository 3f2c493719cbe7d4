"""The file of a page: a frame, the facts of a plan or a comparison, and the bundle that draws them.

Facts are JSON in a script element that no browser runs. In it `<` is written as \\u003c, so that no
name of the user's model can end the element.
"""

from __future__ import annotations

import html
from functools import cache
from importlib.resources import files

_FRAME = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<noscript>This page needs JavaScript. autopar explain says the same as text.</noscript>
<main id="page"></main>
<script type="application/json" id="facts">{facts}</script>
<script>
{script}
</script>
</body>
</html>
"""


def page_html(title: str, facts: str) -> str:
    """A self-contained page; `facts` is JSON, as of `facts_json`."""
    return _FRAME.format(
        title=html.escape(title),
        style=_bundle("page.css"),
        facts=facts.replace("<", "\\u003c"),
        script=_bundle("page.js"),
    )


@cache
def _bundle(name: str) -> str:
    return (files("autopar.report.page") / "web" / "bundle" / name).read_text(encoding="utf-8")
