"""`autopar validate`: predictions beside published runs, a table per paper, then the targets.

For the shipped runs, the check fails if they miss a target. For a user's own runs, the check fails
only if none of them could be predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from autopar.cli.shell import Progress, Result
from autopar.cost.published import (
    SHIPPED,
    AccuracyTarget,
    Cell,
    Entry,
    ErrorSummary,
    Ordering,
    PublishedFigure,
    Score,
    is_runs_file,
    read_runs,
    score,
)
from autopar.errors import OptionError
from autopar.units import format_bytes, format_seconds


def check_output(output: Path) -> None:
    """Refuse a file that cannot be written, or that `--json RUNS.json` would overwrite."""
    if not output.parent.is_dir():
        raise OptionError(f"cannot write {output}: there is no folder {output.parent}")
    if output.exists() and is_runs_file(output):
        raise OptionError(
            f"{output} holds runs, and would be overwritten",
            hint=f"to validate it, put it first: autopar validate {output} --json",
        )


def validate_result(path: Path | None, has_leave_one_out: bool, progress: Progress) -> Result:
    """Score the runs of a file, by default the shipped runs."""
    found = score(read_runs(path or SHIPPED), progress)
    text, data = score_text(found), found.to_json()
    if has_leave_one_out:
        progress("fitting without each paper in turn")
        left_out = found.leave_one_out()
        data |= {"leave_one_out": {paper: asdict(errors) for paper, errors in left_out.items()}}
        text += "\n\n" + leave_one_out_text(left_out)
    is_shipped = path is None or path.resolve() == SHIPPED.resolve()
    if is_shipped:
        ok = all(target.is_met for target in found.targets())
    else:
        ok = found.n_skipped < len(found.entries)
    return Result(text, data, ok)


def score_text(found: Score) -> str:
    """The whole score as text."""
    papers: dict[str, list[Entry]] = {}
    for entry in found.entries:
        if entry.row is not None and entry.skipped is None:
            papers.setdefault(entry.row.paper, []).append(entry)
    width = max((len(entry.id) for entry in found.entries), default=0)
    parts = [
        _lines_of_groups(found),
        *(_lines_of_paper(paper, entries, width) for paper, entries in papers.items()),
        _lines_of_skipped(found.entries),
        _lines_of_cells(
            "saved by a layer for backward, % of tensor parallelism alone",
            found.activation,
            "{:+.1f}",
        ),
        _lines_of_cells("forward and backward of a layer, ms", found.layer, "{:+.1%}"),
        [*_lines_of_targets(found.targets())],
        _lines_of_missing(found.ordering),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _lines_of_groups(found: Score) -> list[str]:
    """Errors by device and software: how large, and which way."""
    groups = found.groups
    width = max(map(len, groups), default=0)
    lines = ["step time by device and software"]
    for name, errors in groups.items():
        if errors.mape is not None and errors.bias is not None:
            way = "slow" if errors.bias > 0 else "fast"
            said = f"mean {errors.mape:6.1%}  on average {abs(errors.bias):.1%} too {way}"
            runs = "run " if errors.n == 1 else "runs"
            lines.append(f"  {name:{width}}  {errors.n:3} {runs}  {said}")
    held, n = found.count_in_interval()
    return [*lines, f"  {held} of {n} published steps lie in their 80% interval"] if n else []


def leave_one_out_text(papers: Mapping[str, ErrorSummary]) -> str:
    """The errors of each paper, predicted with constants fitted to the other papers."""
    lines = ["step time of each paper, predicted by a fit to the others"]
    width = max(map(len, papers), default=0)
    for paper, errors in papers.items():
        if errors.mape is not None and errors.max_error is not None:
            said = f"mean {errors.mape:6.1%}  worst {errors.max_error:6.1%}: {errors.worst}"
            lines.append(f"  {paper:{width}}  {errors.n:3} runs  {said}")
    return "\n".join(lines)


def _lines_of_paper(paper: str, entries: Sequence[Entry], width: int) -> list[str]:
    head = _line("", "", "", ("published", "predicted", "error"), width)
    lines = [paper, head, *(line for entry in entries for line in _lines_of_entry(entry, width))]
    assumed = Counter(what for entry in entries if entry.row for what in entry.row.assumed)
    if assumed:
        known = ", ".join(f"{what} ({n})" for what, n in assumed.items())
        lines.append(f"  assumed where a run does not give it: {known}")
    return lines


def _lines_of_entry(entry: Entry, width: int) -> Iterator[str]:
    if entry.time is not None:
        texts = _texts_of(entry.time, format_seconds)
        yield _line(entry.id, entry.profile or "", "step time", texts, width)
    if entry.memory is not None:
        texts = _texts_of(entry.memory, format_bytes)
        yield _line(entry.id, entry.profile or "", "memory", texts, width)


def _line(name: str, profile: str, metric: str, texts: tuple[str, str, str], width: int) -> str:
    published, predicted, error = texts
    return f"  {name:{width}}  {profile:9}  {metric:9}  {published:>9}  {predicted:>9}  {error:>7}"


def _texts_of(found: PublishedFigure, pretty: Callable[[float], str]) -> tuple[str, str, str]:
    published = "-" if found.published is None else pretty(found.published)
    error = "-" if found.error is None else f"{found.error:+.1%}"
    return published, pretty(found.predicted), error


def _lines_of_skipped(entries: Sequence[Entry]) -> list[str]:
    lines = [f"  {entry.id}: {entry.skipped}" for entry in entries if entry.skipped is not None]
    return ["skipped", *lines] if lines else []


def _lines_of_cells(title: str, cells: Sequence[Cell], error_format: str) -> list[str]:
    width = max((len(cell.name) for cell in cells), default=0)
    lines = []
    for cell in cells:
        said = f"skipped: {cell.skipped}"
        if cell.predicted is not None and cell.error is not None:
            error = error_format.format(cell.error)
            said = f"{cell.published:8.2f}  {cell.predicted:8.2f}  {error:>7}"
        lines.append(f"  {cell.name:{width}}  {said}")
    return [title, *lines] if lines else []


def _lines_of_targets(targets: Sequence[AccuracyTarget]) -> Iterator[str]:
    width = max(len(target.name) for target in targets)
    for target in targets:
        bound = "at most" if target.at_most else "at least"
        said = "met" if target.is_met else "MISSED"
        value, limit = (
            f"{number:.1%}" if target.unit == "%" else f"{number:.1f} {target.unit}"
            for number in (target.value, target.limit)
        )
        yield f"{target.name:{width}}  {value:>10}  {bound} {limit:10}  {said}"


def _lines_of_missing(groups: Mapping[str, Ordering]) -> list[str]:
    """Runs that an order check leaves out, as they have no predicted or no published time."""
    return [
        f"order of {name} was checked without {', '.join(order.missing)}"
        for name, order in groups.items()
        if order.missing
    ]
