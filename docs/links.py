"""Links of pages to documents outside `docs`: on the site, they are downloads.

`[ARCHITECTURE.md](../ARCHITECTURE.md)` leads to a page where the repository is read, but no page of
the site is made of that file. Nothing here imports Sphinx.
"""

from __future__ import annotations

import posixpath
import re

_LINK = re.compile(r"\]\((?P<target>(?:\.\./)+[^)#:\s]+\.md)\)")


def with_downloads(text: str, page: str) -> str:
    """Mark links of a page that leave `docs` as MyST marks files; `page` is its path below it."""

    def marked(match: re.Match[str]) -> str:
        target = match["target"]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        return f"](path:{target})" if place.startswith("..") else match[0]

    return _LINK.sub(marked, text)
