"""A command of `autopar`, and what it said: its JSON, or the message of a refusal."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from autopar.cli import GOOD, WRONG_USE, app


def command(*words: str) -> Result:
    return CliRunner().invoke(app, words, prog_name="autopar", env={"COLUMNS": "100"})


def good(result: Result) -> Any:
    """The JSON object of a command that succeeds; stdout has nothing else."""
    assert result.exit_code == GOOD, result.output
    return json.loads(result.stdout)


def refused(result: Result) -> str:
    """The message of a command that was used wrongly: on stderr; with `--json`, on stdout."""
    assert result.exit_code == WRONG_USE, result.output
    assert "Traceback" not in result.stderr
    if result.stdout:
        error = json.loads(result.stdout)["error"]
        assert "error:" not in result.stderr
        return "\n".join(filter(None, [error["message"], error.get("where"), error["hint"]]))
    return result.stderr
