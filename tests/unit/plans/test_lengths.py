"""`lengths=`: packed documents, of which attention sees few pairs, each microbatch its own."""

from __future__ import annotations

import itertools
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar import Manual, Mesh, OptionError, Plan
from autopar.lengths import Lengths, mean_shown, parse_lengths, row_loads
from tests.helpers.nightly import nightly

N_TOKENS = 65_536  # from here on, documents are ranges of keys
RECIPE = Manual(dp=2, microbatch_size=1)
UNEVEN = parse_lengths([(1024, 0.9), (N_TOKENS, 0.1)])


def shown_by_trying(lengths: Lengths, n_tokens: int) -> float:
    """Over all ways to fill a row."""

    def of(left: int) -> float:
        cut = [(min(n, left), share) for n, share in lengths]
        return sum(share * (n * n + of(left - n)) for n, share in cut) if left else 0.0

    return of(n_tokens) / n_tokens**2


@pytest.mark.parametrize("n_tokens", [1, 5, 16])
@pytest.mark.parametrize(
    "lengths", [((3, 1.0),), ((16, 1.0),), ((1, 0.25), (4, 0.75)), ((2, 0.5), (3, 0.2), (9, 0.3))]
)
def test_the_mean_is_that_of_all_ways_to_fill_a_row(lengths: Lengths, n_tokens: int) -> None:
    assert mean_shown(lengths, n_tokens) == pytest.approx(shown_by_trying(lengths, n_tokens))


def test_rows_of_a_step_are_drawn_from_the_distribution() -> None:
    lengths = ((2, 0.5), (3, 0.2), (9, 0.3))
    loads = row_loads(lengths, 16, 20_000)
    assert loads.mean() == pytest.approx(1)
    least, most = loads.min(), loads.max()
    rows = [r for n in range(9) for r in itertools.combinations_with_replacement((2, 3, 9), n)]
    shown = [sum(n * n for n in row) for row in rows if sum(row) == 16]
    assert most / least == pytest.approx((81 + 49) / min(shown), rel=0.02)  # a row 9, 7 (cut)
    assert np.array_equal(loads, row_loads(lengths, 16, 20_000))


@lru_cache
def plan(manual: Manual, lengths: Lengths = (), packed: bool = True) -> Plan:
    """Of a small model with eight rows of so many tokens; attention is most of its step."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    ids = torch.zeros(8, N_TOKENS, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=N_TOKENS))
    batch = {"input_ids": ids, "labels": ids} | ({"position_ids": ids} if packed else {})
    mesh = Mesh((1, manual.n_ranks), hardware="h100-sxm")
    return autopar.plan(model, mesh, batch, manual=manual, lengths=lengths)


def test_each_microbatch_has_the_time_of_its_documents() -> None:
    made = plan(RECIPE, UNEVEN)
    (times,) = made.simulate().record.stages
    rows = row_loads(UNEVEN, N_TOKENS, 8).reshape(2, 4)
    assert list(times.loads) == pytest.approx(list(rows[rows.sum(axis=1).argmax()]))
    forwards = [e for e in made.simulate().events if e.action.startswith("0F")]
    took_s = [e.end_s - e.start_s for e in sorted(forwards, key=lambda e: e.start_s)]
    loaded_s = times.forward.loaded_s
    mean_s = times.forward.compute_s + times.forward.collectives_s
    assert took_s == pytest.approx([mean_s + (load - 1) * loaded_s for load in times.loads])
    assert loaded_s > 0.5 * mean_s


@nightly
def test_a_plan_keeps_its_lengths_and_says_what_they_show(tmp_path: Path) -> None:
    made = plan(RECIPE, UNEVEN)
    assert "documents: attention sees 0." in made.explain()
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").data.lengths == UNEVEN
    assert f"lengths={UNEVEN}" in made.command()


@nightly
def test_ranks_wait_for_each_other_where_they_gather() -> None:
    """In ZeRO-3 the fullest rank of each microbatch decides."""
    (times,) = plan(Manual(dp=2, zero=3, microbatch_size=1), UNEVEN).simulate().record.stages
    rows = row_loads(UNEVEN, N_TOKENS, 8).reshape(2, 4)
    assert list(times.loads) == pytest.approx(list(rows.max(axis=0)))


@nightly
def test_time_falls_with_the_documents() -> None:
    recipe = Manual(pp=1, dp=1, microbatch_size=4)
    lengths = [(), ((N_TOKENS, 1.0),), ((N_TOKENS // 4, 1.0),), ((64, 1.0),)]
    whole, one, quarter, short = (plan(recipe, of).predicted.step_time_s for of in lengths)
    assert whole == one > quarter > short
    (times,) = plan(recipe).simulate().record.stages
    assert times.loads == ()


@nightly
def test_what_changes_nothing_is_refused() -> None:
    with pytest.raises(OptionError, match="no attention of this model is to documents"):
        plan(Manual(), UNEVEN, packed=False)
    with pytest.raises(OptionError, match="documents of 65537 tokens, and a row has 65536"):
        plan(Manual(), ((N_TOKENS + 1, 1.0),))


BAD: dict[str, tuple[Any, str]] = {
    "shares": ([(1, 0.5), (2, 0.3)], "add up to 0.8, not to 1"),
    "no tokens": ([(0, 1.0)], "1 token or more, not 0"),
    "half a token": ([(1.5, 1.0)], "1 token or more, not 1.5"),
    "no share": ([(1, 0.0), (2, 1.0)], "a share is above 0"),
    "not a number": ([(1, float("nan"))], "a share is above 0"),
    "twice": ([(1, 0.5), (1, 0.5)], "1 tokens twice"),
    "no pairs": ([1, 2], "pairs of tokens and share, not 1"),
    "a number": (7, "pairs of tokens and share, not 7"),
    "a text": ("1024", "'1024' is not TOKENS:SHARE"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pairs(name: str) -> None:
    value, message = BAD[name]
    with pytest.raises(OptionError, match=message):
        parse_lengths(value)


def test_a_text_says_the_same() -> None:
    assert parse_lengths("8192:0.333, 1024:0.667") == parse_lengths([(1024, 0.667), (8192, 0.333)])
    assert sum(share for _, share in parse_lengths("1:0.33,2:0.33,3:0.33")) == pytest.approx(1)
    assert parse_lengths(None) == () == parse_lengths([])
