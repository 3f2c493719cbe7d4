"""The command line: every command is a thin wrapper of one public function.

Read `app` (all commands), `shell` (exit codes, errors, JSON, progress), `options` (planning flags),
`models` and `plans` (MODEL|PLAN.json), `summary` (plans as JSON). Then one file per command:
`operators` (ops), `passes`, `simulate`, `scaling` (simulate --scale), `compare`, `collectives`
(cost), `validate`, `doctor`, `diagnose`. `__main__` is `python -m autopar.cli`.
May import every room; nothing imports it. Commands import torch and autopar lazily: help is quick.
Exit codes: 0 good, 1 a failed check (unequal ranks, a missing rule, an unhealthy machine), 2 wrong
use or an `AutoparError`, whose message goes to stderr, or to stdout as JSON with `--json`.
Hands on `app` and `main`.
"""

from autopar.cli.app import app, main
from autopar.cli.options import parse_degrees
from autopar.cli.shell import FAILED_CHECK, GOOD, WRONG_USE

__all__ = [
    "FAILED_CHECK",
    "GOOD",
    "WRONG_USE",
    "app",
    "main",
    "parse_degrees",
]
