"""`autopar passes`: the compilation's passes, and what each took for one model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.shell import Result
from autopar.errors import OptionError
from autopar.units import format_seconds

if TYPE_CHECKING:
    from autopar.planning import Plan


def list_result() -> Result:
    """What each pass reads and makes."""
    from autopar.passes.pipeline import PASSES

    rows = [
        {
            "name": one.name(),
            "requires": [kind.__name__ for kind in one.requires],
            "provides": [kind.__name__ for kind in one.provides],
            "purpose": one.purpose(),
        }
        for one in PASSES
    ]
    lines = [
        f"{row['name']:12} {', '.join(row['requires'])} -> {', '.join(row['provides'])}\n"
        f"             {row['purpose']}"
        for row in rows
    ]
    return Result("\n".join(lines), {"passes": rows})


def ran_result(plan: Plan) -> Result:
    """Seconds of each pass that ran, and how much it made."""
    from autopar.passes.compilation import size_of
    from autopar.passes.pipeline import PASSES

    assert plan.bound is not None
    compilation = plan.bound.compilation
    _ = plan.bound.sources, plan.bound.predicted
    ran = {one.name: one for one in compilation.ran}
    rows, lines = [], []
    for one in PASSES:
        made = ran.get(one.name())
        sizes = {} if made is None else {type(f).__name__: size_of(f) for f in made.made}
        seconds = None if made is None else made.seconds
        rows.append({"name": one.name(), "seconds": seconds, "made": sizes})
        took = "-" if seconds is None else format_seconds(seconds)
        shown = "; ".join(f"{name}: {size}" for name, size in sizes.items())
        lines.append(f"{one.name():12} {took:>9}  {shown or 'not run: its facts were there'}")
    return Result("\n".join(lines), {"passes": rows})


def text_result(path: Path, only: str | None) -> Result:
    """What the last of some passes makes of the programs in a file."""
    from autopar.passes.compilation import text_of
    from autopar.passes.on_text import run_passes

    names = (only or "verify").split(",")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read {path}: {error}") from error
    last = run_passes(text, names).ran[-1]
    texts = [text_of(fact) for fact in last.made]
    return Result("".join(texts).rstrip(), {"passes": names, "texts": texts})
