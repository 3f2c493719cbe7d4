"""What all commands share: exit codes, errors, a clean stdout, progress.

A command returns a `Result`. `prints_result` prints it, as text or as one JSON object, and exits.
While a command runs, everything else that is printed (by a model's own code, libraries, their child
processes) goes to stderr, so stdout holds only the result.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from autopar.errors import AutoparError, OptionError

GOOD, FAILED_CHECK, WRONG_USE = 0, 1, 2
Progress = Callable[[str], None]
# Where the root's context keeps whether `--json` was given, known before any flag is parsed.
_AS_JSON = "autopar.json"
# Of unknown flags, missing arguments and the like; typer does not export it.
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@dataclass(frozen=True)
class Result:
    """What a command found, as text and as data, and whether its check passed.

    `data` may be a function of it, called if the data are asked for.
    """

    text: str
    data: dict[str, Any] | Callable[[], dict[str, Any]]
    ok: bool = True

    def facts(self) -> dict[str, Any]:
        return self.data() if callable(self.data) else self.data


class ErrorGroup(TyperGroup):
    """Commands whose `AutoparError`s become a message on stderr and exit code 2.

    With `--json`, they and errors of usage become one JSON object on stdout.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        ctx.meta[_AS_JSON] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AutoparError as error:
            if ctx.meta[_AS_JSON]:
                typer.echo(to_json(_error_json(error)))
            else:
                typer.echo(f"error: {error}", err=True)
            raise typer.Exit(WRONG_USE) from error
        except _UsageError as error:
            if not ctx.meta[_AS_JSON]:
                raise
            said = {
                "type": "UsageError",
                "message": cast(Any, error).format_message(),
                "hint": None,
            }
            typer.echo(to_json({"error": said}))
            raise typer.Exit(WRONG_USE) from error


def _error_json(error: AutoparError) -> dict[str, Any]:
    """`where` is there only if it is known."""
    where = {} if error.where is None else {"where": error.where}
    said = {"type": type(error).__name__, "message": error.what, "hint": error.hint}
    return {"error": said | where}


class PanelledCommand(TyperCommand):
    """A command whose help has its own options first, then those of each panel."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_argument = parameter.param_type_name == "argument"
                panel = getattr(parameter, "rich_help_panel", None)
                name = "Arguments" if is_argument else panel or "Options"
                sections.setdefault(name, []).append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


class JsonMayNameFile(PanelledCommand):
    """A command with `--output` for which `--json OUT` means `--output OUT`."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        following = [*args[1:], "-"]
        return super().parse_args(ctx, list(map(_file_of_json, args, following)))


def _file_of_json(word: str, following: str) -> str:
    if word.startswith("--json="):
        return word.replace("--json", "--output", 1)
    return "--output" if word == "--json" and not following.startswith("-") else word


def prints_result(command: Callable[..., Result]) -> Callable[..., None]:
    """Add `--json` to a command that returns a `Result`, print the result and exit."""

    @functools.wraps(command)
    def run(*args: Any, as_json: bool, **kwargs: Any) -> None:
        with _stdout_to_stderr():
            result = command(*args, **kwargs)
            facts = result.facts() if as_json else None
        typer.echo(result.text if facts is None else to_json(facts))
        raise typer.Exit(GOOD if result.ok else FAILED_CHECK)

    flag = inspect.Parameter(
        "as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=JsonFlag
    )
    own = inspect.signature(command, eval_str=True).parameters.values()
    set_parameters(run, [*own, flag])
    return run


def set_parameters(command: Any, parameters: list[inspect.Parameter]) -> None:
    """Give a wrapper the parameters that typer reads; all become keyword-only."""
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    command.__signature__ = inspect.Signature(keywords)
    command.__annotations__ = {p.name: p.annotation for p in keywords}


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send prints to stderr: those of Python, and those of libraries to file descriptor 1."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def to_json(data: dict[str, Any]) -> str:
    """Standard JSON; numbers that are not finite become null."""
    return json.dumps(_finite(data), indent=1, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


@contextmanager
def writing() -> Iterator[None]:
    """Turn an `OSError` of writing a file into an `OptionError`."""
    try:
        yield
    except OSError as error:
        raise OptionError(f"cannot write {error.filename}: {error.strerror}") from error


def note(text: str) -> None:
    """Tell the user something on stderr, beside the result."""
    typer.echo(f"note: {text}", err=True)


@contextmanager
def progress(first_phase: str) -> Iterator[Progress]:
    """A bar on stderr that names the current phase; nothing if stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    disabled = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disabled) as bar:
        # No total: the number of phases depends on what the planner finds.
        task = bar.add_task(first_phase, total=None)
        yield lambda phase: bar.update(task, description=phase)
