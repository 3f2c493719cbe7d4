"""A plan on one screen: its verdict, its axes, a step, memory, three alternatives.

`explanation.py` has the whole. Remarks that change what one would do are in both: axes that repeat
work, state kept in half precision, dtypes that would pay. Recipes that do not fit share a line.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost.hardware import Hardware
from autopar.plans import Alternative, PlanData, Predicted
from autopar.report.device_rates import DeviceRates
from autopar.report.tables import NOT_TRIED, alternative_note, headline, idle_warnings
from autopar.report.words.assumptions import Remark
from autopar.units import format_bytes, format_bytes_of, format_count, format_seconds

_N_ALTERNATIVES = 3


@dataclass(frozen=True)
class Brief:
    """The sentences of the verdict, and labelled lines; a label without text goes on."""

    verdict: Sequence[str]
    rows: Sequence[tuple[str, str]]

    def __str__(self) -> str:
        rows = "\n".join(f"{label:9} {text}".rstrip() for label, text in self.rows)
        return "\n".join([*self.verdict, "", rows])

    def html(self) -> str:
        """For notebooks: the verdict, and the lines as a table."""
        said = "<br>".join(html.escape(sentence) for sentence in self.verdict)
        rows = "".join(
            f'<tr><th style="text-align:left">{html.escape(label)}</th>'
            f'<td style="text-align:left">{html.escape(text)}</td></tr>'
            for label, text in self.rows
        )
        return f"<p>{said}</p><table>{rows}</table>"


def brief(
    data: PlanData,
    predicted: Predicted,
    hardware: Hardware,
    verdict: Sequence[str],
    assumed: Sequence[Remark],
) -> Brief:
    """The plan on its machine; `verdict` and `assumed` are those of `explain`."""
    n_ranks = sum(stage.n_ranks for stage in data.stages)
    figures = DeviceRates.of(predicted, hardware, n_ranks)
    limit_bytes = data.limit_bytes or hardware.memory_limit_bytes
    advice = [r.text if r.label == "advice" else str(r) for r in assumed if r.advises]
    rows = [
        ("plan", headline(data)),
        *(("", warning) for warning in idle_warnings(data)),
        ("step", _step(data, predicted, figures, "GPU" if hardware.is_gpu else "device")),
        ("memory", _memory(predicted, figures, limit_bytes)),
        *_labelled("also", _alternatives(data, limit_bytes)),
        *_labelled("advice", advice),
    ]
    return Brief(verdict, rows)


def _labelled(label: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    for number, text in enumerate(texts):
        yield ("" if number else label), text


def _step(data: PlanData, predicted: Predicted, figures: DeviceRates, device: str) -> str:
    """`9.27 s predicted, MFU 41.4%, 7.07 k tokens/s per GPU, 452 k in all; no plan takes less`"""
    words = [f"{format_seconds(predicted.step_time_s)} predicted"]
    if predicted.mfu:
        words.append(f"MFU {predicted.mfu:.1%}")
    what, each, rate = (
        ("tokens", figures.tokens_per_s, predicted.tokens_per_s)
        if figures.tokens_per_s
        else ("samples", figures.samples_per_s, predicted.samples_per_s)
    )
    if each and rate:
        words.append(f"{format_count(each)} {what}/s per {device}, {format_count(rate)} in all")
    text = ", ".join(words)
    if data.bound_s is not None:
        text += f"; no plan takes less than {format_seconds(data.bound_s)}"
    return text


def _memory(predicted: Predicted, figures: DeviceRates, limit_bytes: float) -> str:
    """`60 of 80 GiB per device, 63 GiB reserved, 4 GiB for CUDA and NCCL, 13 GiB free; ...`."""
    text = f"{format_bytes_of(predicted.peak_bytes, figures.device_bytes)} per device"
    if takes := figures.footprint:
        text += f", {format_bytes(takes.reserved_bytes)} reserved"
        text += f", {format_bytes(takes.margin_bytes)} for CUDA and NCCL"
    if figures.free_bytes > 0:
        text += f", {format_bytes(figures.free_bytes)} free"
    return f"{text}; the limit is {format_bytes(limit_bytes)}"


def _alternatives(data: PlanData, limit_bytes: float) -> list[str]:
    """The best of each family of plans: the search, several stages, each recipe.

    Those that do not fit are left out; of recipes, one line says what each needs more.
    """
    known = {a.name: a for a in data.alternatives}
    own = known[data.chosen].recipe if data.chosen in known else ""
    found: dict[str, Alternative] = {}
    for alternative in data.alternatives:
        if alternative.name not in (data.chosen, NOT_TRIED):
            family = alternative.recipe or alternative.name.partition(" on ")[0]
            kept = found.setdefault(family, alternative)
            if kept.is_too_large and not alternative.is_too_large:
                found[family] = alternative
    rows = [a for a in found.values() if not a.is_too_large][:_N_ALTERNATIVES]
    rows += [a for a in data.alternatives if a.name == NOT_TRIED]
    width = max((len(row.name) for row in rows), default=0)
    texts = []
    for row in rows:
        time = "-" if row.step_time_s is None else format_seconds(row.step_time_s)
        texts.append(f"{row.name:{width}}  {time:>9}  {alternative_note(row, data)}".rstrip())
    large = [
        f"{a.recipe}, by {format_bytes((a.peak_bytes or 0.0) - limit_bytes)}"
        for a in found.values()
        if a.is_too_large and a.recipe not in ("", own)
    ]
    return [*texts, *([f"does not fit: {'; '.join(large)}"] if large else [])]
