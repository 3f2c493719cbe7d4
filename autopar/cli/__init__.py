"""The command line: every command is a thin wrapper of one public function.

    app        the commands; what each prints and its exit code
    options    planning options as flags, and their texts (`2x8`, `40GiB`, `dp=2,tp=4,sp`)
    models     MODEL: a factory, or a Hugging Face config.json
    shell      exit codes, errors, JSON on a clean stdout, progress
    summary    plans as JSON, and plans that are only loaded as text
    plans      MODEL|PLAN.json: saved plans and new ones
    operators  `autopar ops`
    simulate   `autopar simulate` of a plan; `scaling`: of a recipe on more and more nodes
    compare    `autopar compare`
    validate   `autopar validate`
    doctor     `autopar doctor`

Exit codes: 0 good, 1 a check that failed (ranks not equal, a missing rule, an unhealthy
machine), 2 wrong use or an `AutoparError`, whose message goes to stderr. torch and the rest of
autopar are imported inside commands, so that help is quick.
"""

from autopar.cli.app import app, main

__all__ = [
    "app",
    "main",
]
