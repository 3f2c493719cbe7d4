"""Laws of communication beside compute: of predictions, of objectives, and of the prices that the
search gives to what is exposed.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar import Device, Link, Manual, Mesh
from autopar.cost.simulate import PartWork, StageTimes, simulate
from autopar.passes.analysis import Analysis
from autopar.passes.intra.hiding import (
    ExposurePrices,
    ExposureWeights,
    Hiding,
    Parts,
    least_exposed,
)
from autopar.passes.solvers.problem import ChoiceTotals, Solution
from autopar.passes.solvers.repeats import RepeatedChoice
from autopar.plans import Predicted
from autopar.schedule import ORDERS, place
from tests.helpers.captures import captured
from tests.helpers.harness import random_tokens
from tests.helpers.models.wide_models import meta_tokens, wide_gpt2, wide_llama
from tests.helpers.nightly import nightly, one_in

REL = 1e-9
seconds = st.floats(0.0, 10.0)
shares = st.floats(0.0, 1.0)
slowdowns = st.floats(0.0, 0.5)


# -- predictions ---------------------------------------------------------------------------------


def predicted(s_per_byte: float, manual: Manual, n_microbatches: int = 1) -> Predicted:
    device = Device(1e14, 1e12, 1e12, 1e-9)
    mesh = Mesh((1, 4), links=[Link(1e-6, s_per_byte)] * 2, device=device)
    plan = autopar.plan(
        wide_gpt2(4, 512, 128, 1024), mesh, meta_tokens(16, 128), manual=manual,
        microbatches=n_microbatches,
    )  # fmt: skip
    return plan.predicted


@one_in(3)
@pytest.mark.parametrize(("zero", "s_per_byte"), [(0, 1e-11), (2, 2e-10), (3, 1e-9), (3, 1e-11)])
def test_a_step_is_between_the_longer_and_the_sum(zero: int, s_per_byte: float) -> None:
    """Of compute and communication; some of it is hidden, on fast links and on slow ones."""
    found = predicted(s_per_byte, Manual(dp=4, zero=zero))
    compute_s, comm_s = found.compute_time_s + found.optimizer_time_s, found.comm_time_s
    assert max(compute_s, comm_s) <= found.step_time_s * (1 + REL)
    assert found.step_time_s < compute_s + comm_s
    assert found.exposed_comm_s < comm_s
    assert found.step_time_s == pytest.approx(compute_s + found.exposed_comm_s, rel=REL)


def test_faster_links_leave_less_exposed() -> None:
    found = [predicted(s_per_byte, Manual(dp=4)) for s_per_byte in (1e-9, 2e-10, 1e-11)]
    exposed = [p.exposed_comm_s for p in found]
    assert exposed == sorted(exposed, reverse=True)
    assert exposed[-1] < 0.5 * found[-1].comm_time_s, "compute hides most"
    assert exposed[0] > 0.5 * found[0].comm_time_s, "communication takes longer than compute"


def test_sync_hides_behind_the_last_microbatch_alone() -> None:
    few, many = (predicted(2e-10, Manual(dp=4), m) for m in (1, 4))
    assert few.comm_time_s == pytest.approx(many.comm_time_s, rel=1e-2)
    assert few.exposed_comm_s < many.exposed_comm_s


@nightly
@pytest.mark.parametrize(
    ("n_layers", "n_words", "least_share"),
    [(4, 32000, 0.8), (32, 128256, 0.9)],
)
def test_zero_3_hides_all_but_its_ends(n_layers: int, n_words: int, least_share: float) -> None:
    """The last one is Llama 3 8B."""
    mesh, manual = Mesh((8, 8), hardware="h100-sxm"), Manual(dp=64, zero=3)
    plan = autopar.plan(wide_llama(n_layers, n_words), mesh, meta_tokens(64, 8192), manual=manual)
    assert plan.predicted.exposed_comm_s < (1 - least_share) * plan.predicted.comm_time_s
    assert plan.bound is not None
    assert plan.predicted.peak_bytes <= plan.bound.hardware.memory_limit_bytes
    assert "of gathers of parameters" in plan.explain()


# -- what may be hidden --------------------------------------------------------------------------


def test_what_is_known_of_collectives_before_placement() -> None:
    """A tied embedding is gathered first and last; its lookup needs no weight in backward."""
    program = captured(wide_gpt2(4, 64, 16, 128), random_tokens(0), precision="model")
    known = Analysis.of(program).gathering
    of = {program.parameters[name].name: found for name, found in known.items()}
    assert {name for name, found in of.items() if found.first_share} == {"transformer.wte.weight"}
    last_block = {name for name in of if name.startswith("transformer.h.3.")}
    blocks = {name for name in of if name.startswith("transformer.h.")} - last_block
    for name in blocks | last_block:
        is_added = name.endswith(("c_attn.bias", "c_proj.bias", "c_fc.bias"))
        assert len(of[name].again) == (not is_added), "a bias that is added is not saved"
    assert not of["transformer.wte.weight"].again, "the last run stays gathered"
    sizes = {of[name].fused_bytes for name in blocks}
    assert len(sizes) == 1 and sizes.pop() < of["transformer.wte.weight"].fused_bytes


# -- prices --------------------------------------------------------------------------------------


def parts_of(hiding: Hiding, rest_s: float, compute_s: float, sync_s: float, z_s: float) -> Parts:
    hidden_s = rest_s + compute_s + hiding.sync_price * sync_s + hiding.blocks_price * z_s
    return Parts(hidden_s, compute_s, sync_s, z_s)


def weighed_s(parts: Parts, weights: ExposureWeights) -> float:
    return sum((weight * of for weight, of in zip(weights, parts, strict=True)), parts.hidden_s)


@given(*[seconds] * 4, slowdowns, slowdowns, st.integers(1, 8))
def test_a_step_is_between_the_longest_part_and_all(
    rest_s: float, compute_s: float, sync_s: float, z_s: float, f: float, more_f: float, m: int
) -> None:
    """And a slowdown makes nothing faster."""
    steps = []
    for slowdown in (f, max(f, more_f)):
        hiding = Hiding.of(slowdown, 2 / 3)
        parts = parts_of(hiding, rest_s, compute_s, sync_s, z_s)
        steps.append(hiding.step_s(parts, m))
        assert parts.hidden_s <= steps[-1] * (1 + REL)
        assert steps[-1] <= (rest_s + compute_s + sync_s + z_s) * (1 + REL) + REL
        assert max(rest_s + compute_s, z_s) <= steps[-1] * (1 + REL) + REL
    assert steps[0] <= steps[1] * (1 + REL) + REL


@given(*[seconds] * 4, slowdowns, st.integers(1, 8), shares, shares)
def test_every_price_gives_a_lower_bound(
    rest_s: float, compute_s: float, sync_s: float, z_s: float, slowdown: float, m: int,
    of_sync: float, of_blocks: float,
) -> None:  # fmt: skip
    hiding = Hiding.of(slowdown, 2 / 3)
    parts = parts_of(hiding, rest_s, compute_s, sync_s, z_s)
    bound_s = weighed_s(parts, hiding.weights(ExposurePrices(of_sync, of_blocks), m))
    assert bound_s <= hiding.step_s(parts, m) * (1 + REL) + REL


works = st.builds(PartWork, seconds, seconds, seconds)


@given(works, works, seconds, st.integers(1, 100), slowdowns, st.integers(1, 4))
def test_the_law_is_below_the_simulated_step(
    forward: PartWork, backward: PartWork, sync_s: float, n_buckets: int, f: float, m: int
) -> None:
    """A backward computes at most three times as long as a forward."""
    forward = replace(forward, compute_s=max(forward.compute_s, backward.compute_s / 3))
    times = StageTimes(
        1, PartWork(), forward, backward, PartWork(), 0.0, sync_s, n_buckets,
        overlap_slowdown_fraction=f,
    )  # fmt: skip
    script = place(ORDERS["1f1b"](range(1), m), ())
    step_time_s = simulate(script, [times], lambda send: 0.0).step_time_s
    hiding, both = Hiding.of(f, 3 / 4), forward + backward
    last_s = sync_s / n_buckets
    parts = parts_of(
        hiding, m * both.collectives_s + last_s, m * both.compute_s, sync_s - last_s,
        m * both.overlapped_s,
    )  # fmt: skip
    assert hiding.step_s(parts, m) <= step_time_s * (1 + REL) + REL


def test_the_least_steps_are_near_the_optima() -> None:
    """A duality gap may be left; most are small."""
    losses = [loss_of(seed) for seed in range(50)]
    assert sum(losses) / len(losses) < 0.01 and max(losses) < 0.25
    assert sum(loss > 0.1 for loss in losses) <= 2


def loss_of(seed: int) -> float:
    """How far the least step is from the optimum, relative, against every choice of six variables
    with three choices each."""
    drawn = random.Random(seed)
    hiding = Hiding.of(drawn.choice([0.0, 0.1, 0.5]), drawn.choice([2 / 3, 3 / 4]))
    scale = [drawn.choice([0.3, 1.0, 3.0]) for _ in range(4)]
    table = [
        [[drawn.random() * s for s in scale] for _ in range(3)] for _ in range(6)
    ]  # [variables, choices, (rest, compute, s, z)]
    m = drawn.choice([1, 4])

    def of(choice: RepeatedChoice) -> Parts:
        rows = [table[v][k] for v, k in enumerate(choice.base)]
        return parts_of(hiding, *(sum(column) for column in zip(*rows, strict=True)))

    every = [RepeatedChoice(base, ()) for base in itertools.product(range(3), repeat=6)]
    prices = [ExposureWeights(0.0, 0.0, 0.0, 0.0)]

    def solve(weights: ExposureWeights) -> Solution[RepeatedChoice]:
        prices.append(weights)
        choice = min(every, key=lambda c: weighed_s(of(c), weights))
        return Solution(choice, ChoiceTotals(weighed_s(of(choice), weights), 0.0), 0.0)

    best = least_exposed(solve(prices[0]), of, solve, hiding, m)
    step_s, least_s = hiding.step_s(best.parts, m), min(hiding.step_s(of(c), m) for c in every)
    assert best.bound_s <= least_s * (1 + REL)
    assert least_s <= step_s * (1 + REL)

    n_prices, limit_s = len(prices), drawn.uniform(0.9, 1.1) * least_s
    limited = least_exposed(solve(prices[0]), of, solve, hiding, m, limit_s)
    assert len(prices) - n_prices <= n_prices - 1, "a limit saves solves"
    if limit_s > least_s:
        assert limited == best, "a step below the limit is found as without it"
    else:
        assert limited == best or limited.bound_s >= limit_s
    return step_s / least_s - 1
