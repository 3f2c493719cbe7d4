"""Mixed precision of models that are half precision themselves: their state is float32, too.

`test_mixed_precision.py` asks each bit of a step on one rank. Bytes of state are measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call

import autopar
from autopar import Manual, OptionError, ParallelModule, Plan
from autopar.capture import capture
from autopar.cost.memory import peak_memory
from autopar.precision import Precision
from autopar.runtime.launch import WorkerPool
from autopar.runtime.tensors import local_of
from tests.helpers.jobs import CASES, VOCABULARY, adamw, gpt2, machine, tokens
from tests.helpers.nightly import first_by_day, nightly, one_in

Pool = Callable[[int], WorkerPool]
HALF = (torch.bfloat16, torch.float16)
MIXED = ("bf16-mixed", "fp16-mixed", "bf16-autocast")
USED = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
LAYOUTS = {"dp": Manual(dp=2), "zero-3": Manual(dp=2, zero=3), "tp": Manual(tp=2)}
STATE = re.compile(r"(\d+) stored, (\d+) of its gradient, (\d+) of adamw")


def lookup(n_words: int) -> nn.Module:
    """A GPT-2 of one layer with so many words."""
    model: Any = gpt2(1)
    model.resize_token_embeddings(n_words)
    return cast(nn.Module, model)


def check_bytes(precision: str, manual: Manual, n_words: int = VOCABULARY) -> None:
    """One step of models of each dtype, on this rank: what it holds is what the plan says."""
    n_ranks = dist.get_world_size() if dist.is_initialized() else 1
    plans = []
    for dtype in (torch.float32, *HALF):
        pm = autopar.parallelize(
            lookup(n_words).to(dtype), machine((1, n_ranks)), tokens(0),
            precision=precision, manual=manual, microbatches=1,
        )  # fmt: skip
        held = held_tensors(pm, tokens(0), adamw(pm.parameters()))
        assert {t.dtype for tensors in held.values() for t in tensors} == {torch.float32}
        held_bytes = {what: sum(t.nbytes for t in tensors) for what, tensors in held.items()}
        n_elements = held_bytes["parameters"] // 4
        assert state_lines(pm.plan)
        for line in state_lines(pm.plan):
            (in_text,) = STATE.findall(line)
            assert [int(n) * n_elements for n in in_text] == [*held_bytes.values()], dtype
        assert pm.plan.bound is not None
        (stage,) = pm.plan.bound.pipeline.stages
        memory = peak_memory(stage, "adamw")
        assert memory.peak_bytes == pm.plan.predicted.peak_bytes
        for what in ("parameters", "optimizer"):
            assert memory.parts[what] == held_bytes[what], (dtype, what)
        plans.append(pm.plan)
    assert plans[0].code() == plans[1].code() == plans[2].code()
    assert plans[0].predicted == plans[1].predicted == plans[2].predicted


def held_tensors(
    pm: ParallelModule, batch: dict[str, Any], optimizer: torch.optim.Optimizer
) -> dict[str, list[Tensor]]:
    """This rank's shards after a step of AdamW."""
    pm.step(**batch)
    optimizer.step()
    states = optimizer.state.values()
    return {
        "parameters": list(pm.shards.values()),
        "gradients": [p.grad for p in pm.shards.values() if p.grad is not None],
        "optimizer": [local_of(s[key]) for s in states for key in ("exp_avg", "exp_avg_sq")],
    }


@first_by_day
@pytest.mark.parametrize("precision", MIXED)
def test_state_on_one_rank(precision: str) -> None:
    check_bytes(precision, Manual())


@first_by_day
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", USED)
def test_parity_state_on_two_ranks(precision: str, layout: str, workers: Pool) -> None:
    workers(2).run(check_bytes, precision, LAYOUTS[layout])


@nightly
def test_parity_state_of_a_padded_vocabulary(workers: Pool) -> None:
    """33 words are 34 where two ranks share them."""
    workers(2).run(check_bytes, "bf16-mixed", LAYOUTS["tp"], 33)


class Kinds(nn.Module):
    """Parameters of all dtypes; `a` has two names, `b` is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
        self.b = nn.Parameter(torch.ones(4, 4, dtype=torch.float16), requires_grad=False)
        self.c = nn.Parameter(torch.ones(4))
        self.d = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.n = nn.Parameter(torch.arange(4), requires_grad=False)
        self.tied = self.a

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.a) @ self.b @ self.tied * self.c * self.d * self.n).float().sum()


@first_by_day
@pytest.mark.parametrize("precision", MIXED)
def test_dtypes_of_each_parameter(precision: str) -> None:
    program = capture(Kinds(), {"x": torch.ones(2, 4)}, precision=precision)
    infos = program.parameters.values()
    wide, int64 = torch.float32, torch.int64
    stored = {info.name: info.dtype for info in infos}
    assert stored == {"a": wide, "b": wide, "c": wide, "d": torch.float64, "n": int64}
    half = USED.get(precision, torch.bfloat16)
    used = {info.name: program.node(name).meta["val"].dtype
            for name, info in program.parameters.items()}  # fmt: skip
    reduced = {info.name: info.reduce_dtype for info in infos}
    if precision in USED:
        assert used == {"a": half, "b": half, "c": half, "d": half, "n": int64}
        assert reduced == {"a": wide, "b": wide, "c": wide, "d": wide, "n": None}
    else:  # matmuls cast `a` and `b`, products of elements cast nothing
        assert used == {"a": half, "b": half, "c": wide, "d": torch.float64, "n": int64}
        assert reduced == {"a": wide, "b": wide, "c": None, "d": None, "n": None}


def test_reduce_dtype_is_that_of_the_option() -> None:
    program = capture(
        Kinds(), {"x": torch.ones(2, 4)}, precision=Precision("bf16-mixed", torch.bfloat16)
    )
    assert {i.name for i in program.parameters.values() if i.reduce_dtype == torch.bfloat16} == {
        *"abcd"
    }


@first_by_day
@pytest.mark.parametrize("precision", MIXED)
@pytest.mark.parametrize("half", HALF)
def test_verify(half: torch.dtype, precision: str) -> None:
    case = CASES["gpt2"]
    report = autopar.verify(
        case.model().to(half), (1, 2), case.batch(0), precision=precision,
        manual=Manual(dp=2, zero=3),
    )  # fmt: skip
    assert report.ok, report.text()
    assert set(report.capture_errors.values()) == {0.0}
    assert report.lifted_errors and report.lifted_tolerance == 1e-10


@nightly
def test_verify_of_stages_that_share_a_parameter() -> None:
    """The embedding is frozen on the first stage in one model, and learns in the other."""
    for learns in (True, False):
        model = gpt2().bfloat16()
        model.get_parameter("transformer.wte.weight").requires_grad_(learns)
        report = autopar.verify(
            model, (1, 2), tokens(0), precision="bf16-mixed", manual=Manual(pp=2), microbatches=2
        )
        assert report.ok, report.text()
        assert ("transformer.wte.weight" in report.errors) == learns


def test_verify_of_a_model_on_meta() -> None:
    """Its random weights are float32, and not of the model's dtype first."""
    with torch.device("meta"):
        model = gpt2(1).bfloat16()
    report = autopar.verify(model, (1, 2), tokens(0), precision="fp16-mixed", manual=Manual(tp=2))
    assert report.ok, report.text()
    assert set(report.capture_errors.values()) == {0.0}


def mixed(model: nn.Module, **options: Any) -> ParallelModule:
    return autopar.parallelize(
        model, (1, 1), tokens(0), precision="bf16-mixed", microbatches=1, **options
    )


@first_by_day
@pytest.mark.parametrize("half", HALF)
def test_weights_of_a_file_are_not_rounded(half: torch.dtype, tmp_path: Path) -> None:
    """A file in bfloat16 or float32 is read into float32, whatever the model's dtype."""
    torch.manual_seed(0)
    source = gpt2(1)
    for dtype in (torch.bfloat16, torch.float32):
        values = {name: p.detach().to(dtype) for name, p in source.named_parameters()}
        save_file(values, tmp_path / "model.safetensors")
        found = mixed(gpt2(1).to(half), weights=str(tmp_path)).full_state_dict()
        for name, value in values.items():
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], value.float()), name


def test_weights_of_a_model_on_meta() -> None:
    """Initialised as in one process, in the model's dtype, and stored in float32."""
    with torch.device("meta"):
        model = gpt2(1).bfloat16()
    found = mixed(model, weights="init").full_state_dict()
    for name, value in found.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, value.bfloat16().float()), name
    assert found["transformer.wte.weight"].std() > 0


def test_a_checkpoint_of_half_precision_is_loaded_into_float32(tmp_path: Path) -> None:
    """A run in the model's dtype goes on in mixed precision, and that one bit for bit."""
    case = CASES["gpt2"]
    half = autopar.parallelize(
        case.model().bfloat16(), (1, 1), case.batch(0), precision="model", microbatches=1
    )
    before = adamw(half.parameters())
    half.step(**case.batch(0))
    before.step()
    autopar.save(half, before, tmp_path / "half", step=1)
    pm = mixed(case.model().bfloat16())
    optimizer = adamw(pm.parameters())
    autopar.load(pm, optimizer, tmp_path / "half")
    loaded = pm.full_state_dict()
    for name, value in half.full_state_dict().items():
        assert loaded[name].dtype == torch.float32 and torch.equal(loaded[name], value.float())
    held = held_tensors(pm, case.batch(1), optimizer)
    assert {t.dtype for tensors in held.values() for t in tensors} == {torch.float32}
    optimizer.zero_grad()
    autopar.save(pm, optimizer, tmp_path / "wide", step=2)
    again = mixed(case.model().bfloat16())
    other = adamw(again.parameters())
    autopar.load(again, other, tmp_path / "wide")
    for module, updates in ((pm, optimizer), (again, other)):
        module.step(**case.batch(2))
        updates.step()
    goes_on = again.full_state_dict()
    assert all(torch.equal(goes_on[name], value) for name, value in pm.full_state_dict().items())


@one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_evaluation_uses_half_precision(dtype: torch.dtype) -> None:
    case = CASES["gpt2"]
    model = case.model().to(dtype)
    pm = mixed(model)
    pm.eval()
    used = {name: p.float().bfloat16() for name, p in model.named_parameters()}
    with torch.no_grad():
        wanted = functional_call(model.eval(), used, (), case.batch(0))
    found = pm(**case.batch(0))
    assert found.logits.dtype == torch.bfloat16
    assert torch.equal(found.logits, wanted.logits) and torch.equal(found.loss, wanted.loss)


def state_lines(plan: Plan) -> list[str]:
    return [line for line in plan.explain().splitlines() if line.startswith("state:")]


@one_in(2)
@pytest.mark.parametrize(("half", "policy"), [*zip(HALF, USED, strict=True)])
def test_a_plan_says_what_is_kept_in_half_precision(half: torch.dtype, policy: str) -> None:
    model, name = gpt2(1).to(half), str(half).removeprefix("torch.")
    plans = [
        autopar.plan(model, (1, 1), tokens(0), **options)
        for options in ({}, {"master_weights": True}, {"precision": policy})
    ]
    assert [state_lines(plan) for plan in plans] == [
        ["state: 8 bytes a parameter: 2 stored, 2 of its gradient, 4 of adamw, all in "
         f'{name}; precision="{policy}" keeps float32'],
        *2 * [["state: 16 bytes a parameter: 4 stored, 4 of its gradient, 8 of adamw; and 2 of its "
               "cast while a step runs"]],
    ]  # fmt: skip


def test_a_plan_says_whose_state_is_in_which_dtype() -> None:
    model = gpt2(1).bfloat16()
    model.get_submodule("transformer.ln_f").float()
    half, wide = state_lines(autopar.plan(model, (1, 1), tokens(0)))
    assert half == (
        "state: 8 bytes a parameter: 2 stored, 2 of its gradient, 4 of adamw, all in bfloat16; "
        'precision="bf16-mixed" keeps float32 (transformer.h.*.mlp.c_fc.weight, '
        "transformer.h.*.mlp.c_proj.weight and 12 more)"
    )
    assert wide == (
        "state: 16 bytes a parameter: 4 stored, 4 of its gradient, 8 of adamw "
        "(transformer.ln_f.weight, transformer.ln_f.bias)"
    )


@pytest.mark.parametrize("precision", [*MIXED, "fp64"])
def test_master_weights_are_part_of_mixed_precision(precision: str) -> None:
    with pytest.raises(OptionError, match=r"stores parameters in float(32|64) already"):
        autopar.plan(gpt2(1), (1, 1), tokens(0), precision=precision, master_weights=True)
