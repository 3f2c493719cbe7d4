"""Why a decision was taken, as text: the options that it beat, and what they would cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.placement import Spec
from autopar.plans import Choice, Decision, Option, operator_text
from autopar.program.lines import Storage
from autopar.units import format_bytes, format_seconds

N_READERS = 4
_PERIODS = {
    "step": "gathered once a step (ZeRO-1)",
    "micro": "gathered once a step, gradients scattered each microbatch (ZeRO-2)",
    "use": "gathered at use (ZeRO-3)",
}


def next_best_lines(
    decision: Decision, step_time_s: float, n_stages: int, said: str = ""
) -> list[str]:
    """The lines that explain one decision: its readers, its source, the choice and what it beat.

    `said` is the text above these lines; a source that it names is not repeated. `step_time_s` is
    the plan's step time: percentages are relative to it.
    """
    lines = [f"read by {text}" for text in decision.read_by[:N_READERS]]
    more = len(decision.read_by) - N_READERS
    lines += [f"and by {more} more"] if more > 0 else []
    lines += [f"at {decision.source}"] if decision.source and decision.source not in said else []
    if decision.choice is None:
        return [*lines, f"no alternatives: the recipe decides it ({decision.recipe})"]
    where = f" of stage {decision.stage}" if n_stages > 1 else ""
    return [*lines, *_choice(decision, decision.choice, step_time_s, where)]


def _choice(decision: Decision, choice: Choice, step_time_s: float, where: str) -> Iterator[str]:
    what = "strategies" if decision.source else "storages"
    chosen = choice.chosen
    if chosen is None:
        yield f"chosen: none of the {choice.n_options} {what} that the search considers"
    elif choice.n_options == 1:
        yield f"no alternatives: no other {what} are possible" + _kept_text(choice)
        return
    elif chosen.extra_s > 0:
        yield (
            f"chosen: one of {choice.n_options} {what}, for its memory, a tie or force: the "
            f"fastest takes {format_seconds(chosen.extra_s)} a step{where} less"
        )
    else:
        equal = choice.n_as_fast - 1
        others = f", {equal} {'is' if equal == 1 else 'are'} as fast" if equal else ""
        yield f"chosen: the fastest of {choice.n_options} {what}{others}"
    texts = [_option(decision, option) for option in choice.others]
    width = max(map(len, texts), default=0)
    head = "next best:"
    for text, option in zip(texts, choice.others, strict=True):
        is_faster = chosen is not None and option.extra_s < chosen.extra_s
        price = _price(option, chosen, step_time_s, where)
        yield f"{'faster:' if is_faster else head:10} {text:{width}}  {price}"
        head = head if is_faster else "then:"
    yield f"({_meaning(choice, where)})"


def _meaning(choice: Choice, where: str) -> str:
    rest = "costs if all that can hide is hidden, after re-optimizing all else"
    if choice.rest == "kept":
        rest = "costs with everything else kept, as re-optimizing it needs too large tables"
    words = [f"{rest}{where if choice.rest == 'anew' else ''}, without a memory limit"]
    if choice.blocks is not None:
        few, every = choice.blocks
        words.append(f"computed on {few} of {every} repeated blocks, one represents the rest")
    if choice.runs_again:
        words.append("recompute is not counted")
    return "; ".join(words)


def _kept_text(choice: Choice) -> str:
    return " with everything else kept" if choice.rest == "kept" else ""


def _price(option: Option, chosen: Option | None, step_time_s: float, where: str) -> str:
    """`+1.23 ms a step (+0.8%), 210 MiB less than the chosen`; without `chosen`, than the fastest,
    which the search considers."""
    time_s = option.extra_s - (chosen.extra_s if chosen else 0.0)
    size_bytes = option.extra_bytes - (chosen.extra_bytes if chosen else 0.0)
    reference = "the chosen" if chosen else "the fastest"
    if time_s == 0:
        time = "as fast"
    else:
        time = f"{'+' if time_s > 0 else '-'}{format_seconds(abs(time_s))} a step{where}"
        if not where:  # one stage's seconds are not a share of the step: it has other stages
            time += f" ({100 * time_s / step_time_s:+.2g}%)"
    if abs(size_bytes) < 1:
        size = f"as much memory as {reference}"
    else:
        more = "less" if size_bytes < 0 else "more"
        size = f"{format_bytes(abs(size_bytes))} {more} than {reference}"
    return f"{time}, {size}"


def _option(decision: Decision, option: Option) -> str:
    if option.strategy is not None:
        return operator_text(option.strategy.inputs, option.strategy.outputs)
    assert option.storage is not None, "an option is a storage or a strategy"
    return storage_words(option.storage, option.uses, decision.axis_names, decision.axis_sizes)


def storage_words(
    storage: Storage, uses: Sequence[Spec], names: Sequence[str], sizes: Sequence[int]
) -> str:
    """`S(0)@dp gathered at use (ZeRO-3)`: how a parameter is stored and used, on the axes that
    have several ranks."""
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    stored = storage.spec.placements
    cut = [f"{stored[a]}@{names[a]}" for a in axes if stored[a].is_shard]
    words = [" ".join(cut) or "whole"]
    if storage.spec.order:
        words.append(f"({' outside '.join(names[a] for a in storage.spec.order if a in axes)})")
    notes: dict[str, None] = {}
    moved: dict[str, None] = {}
    for a in axes:
        for use in uses:
            used, kept = use.placements[a], stored[a]
            if kept.is_shard and used.kind in "RI":
                notes.setdefault(_PERIODS[storage.period])
            elif kept.is_shard and used != kept:
                moved.setdefault(f"{used}@{names[a]}")
            elif used.is_shard and not kept.is_shard:
                notes.setdefault(f"cut at use to {used}@{names[a]}")
            elif used.kind == "R" and not kept.is_shard:
                notes.setdefault(f"gradients all_reduced over {names[a]}")
    said = [*notes, *([f"used {' '.join(moved)}"] if moved else [])]
    return ", ".join([" ".join([*words, *said[:1]]), *said[1:]])
