"""autopar itself imports none of the frameworks."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import sys
for name in ("accelerate", "lightning", "pytorch_lightning", "transformers"):
    sys.modules[name] = None  # importing it raises
import autopar, autopar.integrations
for name in autopar.__all__:
    getattr(autopar, name)
"""


def test_autopar_needs_no_framework() -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True)
