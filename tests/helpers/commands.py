"""What a command of `autopar` said: its JSON, or the message of a refusal."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import Result

from autopar.cli import shell


def good(result: Result) -> Any:
    """The JSON object of a command that succeeds; stdout has nothing else."""
    assert result.exit_code == shell.GOOD, result.output
    return json.loads(result.stdout)


def refused(result: Result) -> str:
    """The message on stderr of a command that was used wrongly; stdout is empty."""
    assert result.exit_code == shell.WRONG_USE, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr
