"""The facts that a page carries, read as a browser would."""

from __future__ import annotations

import json
import re
from typing import Any

_FACTS = re.compile(r'<script type="application/json" id="facts">(.*?)</script>', re.DOTALL)


def page_facts(text: str) -> dict[str, Any]:
    (found,) = _FACTS.findall(text)
    facts: dict[str, Any] = json.loads(found)
    return facts
