"""Vocabularies that the ranks do not divide: padded where that is exact, and nowhere seen.

The reference is always the program without padding, on one process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

import autopar
from autopar import Manual, PlanError
from autopar.capture import capture, reference_step
from autopar.passes.padding import find_paddings, pad
from autopar.plan_data import PlanData
from autopar.program import Program
from autopar.runtime.dtensors import dtensor_of
from autopar.runtime.launch import WorkerPool
from autopar.runtime.lowered import vocab_parallel_cross_entropy, vocab_parallel_embedding
from autopar.runtime.sharding import boxes, gather_whole, local_shard
from autopar.runtime.threads import ThreadWorld, run_threads
from autopar.spec import I, S, Spec
from autopar.stage_program import StoredParameter
from tests.harness import generated_code  # noqa: F401
from tests.jobs import adamw, error, machine
from tests.state_model import mesh_of, stored

VOCABULARY, WIDTH, LENGTH, N_ROWS = 61, 16, 4, 8
TOLERANCE = 1e-10
Pool = Callable[[int], WorkerPool]
Model = Callable[[], nn.Module]


def gpt2() -> nn.Module:
    """The head is tied to the embedding."""
    probabilities = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = AutoConfig.for_model(
        "gpt2", n_layer=1, n_embd=WIDTH, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH,
        bos_token_id=0, eos_token_id=0, **probabilities,
    )  # fmt: skip
    return seeded(AutoModelForCausalLM, config)


def llama() -> nn.Module:
    """The head is a table of its own."""
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=1, hidden_size=WIDTH, intermediate_size=2 * WIDTH,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    return seeded(AutoModelForCausalLM, config)


def bert() -> nn.Module:
    """The tied head has a bias of the vocabulary's size."""
    config = AutoConfig.for_model(
        "bert", num_hidden_layers=1, hidden_size=WIDTH, num_attention_heads=4,
        intermediate_size=2 * WIDTH, vocab_size=VOCABULARY, max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return seeded(AutoModelForMaskedLM, config)


class Smoothed(nn.Module):
    """Capped logits with a constant bias, smoothed labels, and another label that is ignored."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)
        self.register_buffer("bias", torch.linspace(-1, 1, VOCABULARY))

    def logits(self, ids: Tensor) -> Tensor:
        scores = torch.einsum("bsh,vh->bsv", self.embed(ids), self.embed.weight)
        return 3 * torch.tanh(scores / 3) + self.bias

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.logits(input_ids)
        rows = logits.view(-1, VOCABULARY), labels.view(-1)
        loss = F.cross_entropy(*rows, ignore_index=5, label_smoothing=0.1)
        return {"loss": loss, "logits": logits}


class Softmax(Smoothed):
    """Reads the probabilities of all classes, in training too."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = super().forward(input_ids, labels)
        entropy = found["logits"].softmax(-1).square().sum()
        return {**found, "loss": found["loss"] + 0.1 * entropy}


class SoftmaxWhenEvaluated(Smoothed):
    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = super().forward(input_ids, labels)
        return found if self.training else {**found, "logits": found["logits"].softmax(-1)}


def seeded(kind: Any, config: Any) -> nn.Module:
    """The same weights on every process, large enough that logits differ."""
    torch.manual_seed(0)
    model: nn.Module = kind.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def batch(make: Model, seed: int = 0) -> dict[str, Any]:
    """The last id is among ids and labels; labels are ignored unevenly."""
    ignored = 5 if make in (Smoothed, Softmax, SoftmaxWhenEvaluated) else -100
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (N_ROWS, LENGTH), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.4, ignored)
    ids[0, 0], labels[1], labels[2] = VOCABULARY - 1, ignored, VOCABULARY - 1
    return {"input_ids": ids, "labels": labels}


EMBEDDING = "transformer.wte.weight"
PADDED: dict[Model, dict[str, tuple[int, ...]]] = {
    gpt2: {EMBEDDING: (64, WIDTH)},
    llama: {"model.embed_tokens.weight": (64, WIDTH), "lm_head.weight": (64, WIDTH)},
    bert: {
        "bert.embeddings.word_embeddings.weight": (64, WIDTH),
        "cls.predictions.bias": (64,),
    },
    Smoothed: {"embed.weight": (64, WIDTH)},
}


# -- the padded program ----------------------------------------------------------------------------


def drawn(program: Program) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        p.name: torch.randn(p.shape, dtype=torch.float64, generator=generator).requires_grad_()
        for p in program.parameters.values()
    }


def lengthened(value: Tensor, shape: Sequence[int], last: float) -> Tensor:
    """`value` with rows of `last` up to a shape."""
    out = value.new_full(tuple(shape), last)
    out[tuple(map(slice, value.shape))] = value.detach()
    return out.requires_grad_()


def gradient(value: Tensor) -> Tensor:
    return torch.zeros_like(value) if value.grad is None else value.grad


@pytest.mark.parametrize("make", PADDED)
def test_nothing_sees_what_padding_holds(make: Model) -> None:
    """Loss, outputs and gradients are those without it, and its own gradient is exactly 0."""
    program = capture(make(), batch(make), precision="fp64")
    found = find_paddings(program, 4)
    assert found.shapes == PADDED[make]
    plain = drawn(program)
    values = {n: lengthened(v, found.shapes.get(n, v.shape), 7.0) for n, v in plain.items()}
    loss, outputs = reference_step(program, plain, batch(make))
    same_loss, same_outputs = reference_step(pad(program, found.shapes), values, batch(make))
    assert loss is not None
    assert same_loss is not None
    assert torch.equal(loss, same_loss)
    assert torch.equal(outputs["logits"], same_outputs["logits"])
    loss.backward()
    same_loss.backward()
    for name, value in plain.items():
        expected = lengthened(gradient(value), values[name].shape, 0.0)
        assert error(gradient(values[name]), expected) <= 1e-13, name
        if name in found.shapes:
            assert not gradient(values[name])[VOCABULARY:].any()


def test_evaluation_that_reads_all_classes_takes_the_parameter_without_padding() -> None:
    """A plan's parameters are padded already where training alone would allow it."""
    model = SoftmaxWhenEvaluated()
    shapes = find_paddings(capture(model, batch(SoftmaxWhenEvaluated), precision="fp64"), 4).shapes
    assert shapes == PADDED[Smoothed]
    model.eval()
    program = capture(model, batch(SoftmaxWhenEvaluated), training=False, precision="fp64")
    assert find_paddings(program, 4).shapes == {}
    plain = drawn(program)
    values = {n: lengthened(v, shapes.get(n, v.shape), 7.0) for n, v in plain.items()}
    _, outputs = reference_step(program, plain, batch(SoftmaxWhenEvaluated))
    _, same = reference_step(pad(program, shapes), values, batch(SoftmaxWhenEvaluated))
    assert torch.equal(outputs["logits"], same["logits"])


class OneHot(nn.Module):
    """Its classes are a dim of an input, too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x) + bias, labels)


class Grouped(OneHot):
    """Its 60 classes are 6 groups of 10."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 60)

    def forward(self, x: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        grouped = self.head(x).view(-1, 6, 10) + bias.view(-1, 1, 1)
        return F.cross_entropy(grouped.view(-1, 60), labels)


class Few(OneHot):
    """Padding would be a third of it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 6)


ROWS = {
    "x": torch.zeros(N_ROWS, WIDTH),
    "bias": torch.zeros(N_ROWS, VOCABULARY),
    "labels": torch.zeros(N_ROWS, dtype=torch.int64),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor], str]] = {
    "embed.weight": (Softmax, batch(Smoothed), r"dim 0 of 61 .* 8 ranks: aten\.softmax\.int meets"),
    "head.weight": (OneHot, ROWS, "dim 0 of 61 .*: `bias`, which is no parameter, has it"),
    "head.bias": (
        Few,
        ROWS | {"bias": torch.zeros(N_ROWS, 1)},
        r"dim 0 of 6 .*: padding it to 8 adds more than 12\.5%",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_proved_exact_is_left_alone(name: str) -> None:
    make, given, reason = REFUSED[name]
    program = capture(make(), given)
    found = find_paddings(program, 8)
    assert found.shapes == {}
    assert re.search(reason, found.refused[name]), found.refused
    assert pad(program, found.shapes) is program


def test_a_dim_of_several_factors_is_left_alone() -> None:
    given = ROWS | {"bias": torch.zeros(N_ROWS, 1)}
    assert find_paddings(capture(Grouped(), given), 8).shapes == {}


@pytest.mark.parametrize("shape", [(60, WIDTH), (64,)])
def test_a_plan_cannot_shorten_a_parameter(shape: tuple[int, ...]) -> None:
    program = capture(Smoothed(), batch(Smoothed))
    with pytest.raises(PlanError, match=r"embed.weight \[61, 16\] cannot be padded to"):
        pad(program, {"embed.weight": shape})


def test_the_reason_is_in_the_plan() -> None:
    plan = autopar.plan(
        Softmax(), machine((1, 4)), batch(Softmax), microbatches=1, manual=Manual(tp=4)
    )
    reason = "dim 0 of 61 is not sharded over 4 ranks: aten.softmax.int meets it at /softmax.int"
    assert plan.data.padded == {}
    assert f"\nembed.weight: {reason}" in plan.explain()
    assert reason in plan.explain("embed.weight")


# -- planned and run -------------------------------------------------------------------------------

RUN: dict[str, tuple[Model, tuple[int, int], dict[str, Any]]] = {
    "gpt2, tensor parallel": (gpt2, (1, 4), {"manual": Manual(tp=4)}),
    "gpt2, stages": (gpt2, (2, 2), {"manual": Manual(pp=2, tp=2)}),
    "llama, ZeRO-3": (llama, (1, 4), {"manual": Manual(dp=4, zero=3)}),
    "bert, both": (bert, (2, 2), {"manual": Manual(dp=2, tp=2)}),
    "smoothed labels": (Smoothed, (1, 4), {"manual": Manual(tp=4)}),
}


@pytest.mark.parametrize("name", RUN)
def test_parity(name: str) -> None:
    """On thread ranks; padding's gradient is 0, or it would be an error."""
    make, shape, options = RUN[name]
    report = autopar.verify(
        make(), machine(shape), batch(make), precision="fp64", microbatches=2, **options
    )
    assert report.ok, report.text()
    assert report.plan.data.padded == PADDED[make]
    sharded = {n for n, placed in report.plan.placements.items() if "S(0)" in placed}
    assert sharded >= set(PADDED[make])


def test_what_a_plan_does_not_shard_is_not_padded() -> None:
    options = {"microbatches": 1, "manual": Manual(dp=4)}
    plan = autopar.plan(Smoothed(), machine((1, 4)), batch(Smoothed), **options)
    assert plan.data.padded == {}
    assert plan.data.graph_hash == capture(Smoothed(), batch(Smoothed)).hash()


class TiedHead(nn.Module):
    """The embedding and the head of GPT-2, and little between."""

    def __init__(self, n_classes: int = 50257, width: int = 768) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(n_classes, width), nn.Linear(width, width)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(self.middle(self.embed(ids)), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_the_planner_shards_the_vocabulary_of_gpt2() -> None:
    with torch.device("meta"):
        model = TiedHead()
        ids = torch.zeros(8, 128, dtype=torch.int64)
    mesh = autopar.Mesh((1, 8), hardware="a100-80gb")
    plan = autopar.plan(model, mesh, {"ids": ids, "labels": ids}, stages=1, microbatches=1)
    assert plan.data.padded == {"embed.weight": (50264, 768)}
    (loss,) = [text for key, text in plan.data.operators.items() if "cross_entropy" in key]
    assert "S(1)" in loss
    assert plan.explain("embed.weight").startswith(
        "embed.weight [50257, 768], padded to [50264, 768]: stored"
    )
    again = autopar.Plan(PlanData.from_json(plan.data.to_json())).bind(model)
    assert again.predicted == plan.predicted


# -- functions over padding ------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [10, 11])
def test_ids_in_the_padding_fail_as_in_torch(wrong: int) -> None:
    """10 rows of 12: without padding there are none of that number."""
    table, ids = torch.ones(12, 2), torch.tensor([wrong])

    def embedding(world: ThreadWorld) -> None:
        g = world.make_groups(mesh_of((2,)))[(0,)]
        vocab_parallel_embedding(table[:6], ids, g, -1, 10)

    def cross_entropy(world: ThreadWorld) -> None:
        g = world.make_groups(mesh_of((2,)))[(0,)]
        vocab_parallel_cross_entropy(torch.ones(1, 6), ids, g, n_valid=10)

    for work in (embedding, cross_entropy):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            run_threads(work, 2)
    with pytest.raises(IndexError, match="out of range"):
        torch.ops.autopar.padded_embedding(table, ids, n_valid=10)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        torch.ops.autopar.padded_cross_entropy(torch.ones(1, 12), ids, n_valid=10)


# -- state -----------------------------------------------------------------------------------------


def kept(spec: Spec, sizes: tuple[int, ...], size: int = 61, padded: int = 64) -> StoredParameter:
    return replace(stored("p", ((padded,), (3,)), spec, sizes, torch.float64), shape=(size, 3))


def counting(size: int) -> Tensor:
    return torch.arange(1.0, 3 * size + 1, dtype=torch.float64).view(size, 3)


CUT: dict[str, tuple[tuple[int, ...], StoredParameter]] = {
    "over one axis": ((2,), kept(Spec((S(0),)), (2,), padded=62)),
    "over one of two": ((1, 2), kept(Spec((I, S(0))), (1, 2), padded=62)),
    "padded for more ranks": ((2,), kept(Spec((S(0),)), (2,), padded=64)),
    "over two axes": ((2, 2), kept(Spec((S(0), S(0))), (2, 2))),
    "in another order": ((2, 2), kept(Spec.of((S(0), S(0)), (1, 0)), (2, 2))),
    "along the other dim": ((3,), kept(Spec((S(1),)), (3,))),
    "not at all": ((2,), kept(Spec((I,)), (2,))),
    "ranks without any": ((4,), kept(Spec((S(0),)), (4,), size=5, padded=8)),
    "one without any": ((2,), kept(Spec((S(0),)), (2,), size=1, padded=2)),
}


@pytest.mark.parametrize("case", CUT)
def test_padding_comes_in_as_zeros_and_never_leaves(case: str) -> None:
    sizes, p = CUT[case]
    whole = counting(p.shape[0])

    def work(world: ThreadWorld) -> None:
        mesh = mesh_of(sizes)
        at = mesh.coordinate(world.rank)
        local = local_shard(whole, p, sizes, at)
        assert local.shape == p.stored.shape
        assert local.is_contiguous()
        filled = torch.zeros_like(local)
        for box in boxes(p, sizes, at):
            filled[box.of_shard] = whole[box.of_whole]
        assert torch.equal(filled, local)
        back = gather_whole(local + (local == 0) * 9, p, sizes, world.make_groups(mesh))
        assert torch.equal(back, whole)
        assert back.untyped_storage().nbytes() == whole.untyped_storage().nbytes()

    run_threads(work, mesh_of(sizes).n_ranks)


def export() -> dict[str, tuple[bool, bool]]:
    """Case -> is the DTensor right, and does it share the shard's memory."""
    found = {}
    for case, (sizes, p) in CUT.items():
        if mesh_of(sizes).n_ranks == 2:
            mesh, whole = init_device_mesh("cpu", sizes), counting(p.shape[0])
            local = local_shard(whole, p, sizes, mesh.get_coordinate() or ())
            made = dtensor_of(p, local, mesh)
            part, is_right = made.to_local(), torch.equal(made.full_tensor(), whole)
            found[case] = is_right, not part.numel() or part.data_ptr() == local.data_ptr()
    return found


def test_dtensors_are_uneven(workers: Pool) -> None:
    """In place where shards are `torch.chunk`'s; padded for 4 ranks and cut by 2 they are not."""
    for found in workers(2).run(export):
        assert all(is_right for is_right, _ in found.values()), found
        copied = [case for case, (_, shares) in found.items() if not shares]
        assert copied == ["padded for more ranks"]


# -- on processes, by the public API ---------------------------------------------------------------


def trained(folder: str, manual: Manual, first: str | None, last: str | None) -> dict[str, Any]:
    """Two steps between checkpoints; evaluation where nothing is saved."""
    module = autopar.parallelize(
        gpt2(), machine((1, 2)), batch(gpt2), precision="fp64", microbatches=2, manual=manual
    )
    optimizer = adamw(module.parameters())
    if first is not None:
        autopar.load(module, optimizer, f"{folder}/{first}")
    losses = []
    for step in range(2):
        losses.append(module.step(**batch(gpt2, step)).item())
        norm = module.clip_grad_norm_(1e3)
        optimizer.step()
        optimizer.zero_grad()
    if last is not None:
        autopar.save(module, optimizer, f"{folder}/{last}")
    whole = module.full_state_dict()
    module.load_state_dict(whole)
    held = {n: v.full_tensor() for n, v in module.state_dict().items() if isinstance(v, DTensor)}
    local = module.shards[EMBEDDING].detach().clone()
    found = {"losses": losses, "norm": norm, "whole": whole, "held": held, "local": local}
    if last is None:
        module.eval()
        found["logits"] = module(input_ids=batch(gpt2)["input_ids"]).logits
    return found | {"padded": module.plan.data.padded}


@lru_cache
def alone(n_steps: int) -> dict[str, Any]:
    """The last two of some steps of the captured program on one process."""
    model, given = gpt2(), batch(gpt2)
    program = capture(model, given, precision="fp64")
    values = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    optimizer = adamw(values.values())
    losses = []
    for step in range(n_steps):
        loss, _ = reference_step(program, values, batch(gpt2, step % 2))
        assert loss is not None
        loss.backward()
        losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(values.values(), 1e3)
        optimizer.step()
        optimizer.zero_grad()
    whole = {n: v.detach() for n, v in values.items()}
    whole["lm_head.weight"] = whole[EMBEDDING]
    _, outputs = reference_step(program, values, given)
    return {"losses": losses[-2:], "norm": norm, "whole": whole, "logits": outputs.logits.detach()}


def off(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What differs from one process, in shape or value."""
    compared = [name for name in ("norm", "logits") if name in found]
    pairs = {name: (found[name], wanted[name]) for name in compared}
    pairs["losses"] = torch.tensor(found["losses"]), torch.tensor(wanted["losses"])
    for kind in ("whole", "held"):
        for name, value in found[kind].items():
            pairs[f"{kind} {name}"] = value, wanted["whole"][name]
    return [n for n, (a, b) in pairs.items() if a.shape != b.shape or not error(a, b) <= TOLERANCE]


def test_training_and_checkpoints_on_processes(workers: Pool, tmp_path: Path) -> None:
    """Saved by a plan that pads, read by one that cuts nothing, and then by ZeRO-3."""
    folder = str(tmp_path)
    first = workers(2).run(trained, folder, Manual(tp=2), None, "a")
    second = workers(2).run(trained, folder, Manual(dp=2), "a", "b")
    third = workers(2).run(trained, folder, Manual(dp=2, zero=3), "b", None)
    padded = {EMBEDDING: (62, WIDTH)}
    assert [results[0]["padded"] for results in (first, second, third)] == [padded, {}, padded]
    for results in (first, third):
        assert [r["local"].shape for r in results] == [(31, WIDTH)] * 2
        assert not results[1]["local"][30].any()
    assert all("logits" in found for found in third)
    for n_steps, results in ((2, first), (4, second), (6, third)):
        assert set(results[0]["whole"]) == set(alone(n_steps)["whole"])
        assert [off(found, alone(n_steps)) for found in results] == [[], []]


def evaluated() -> tuple[dict[str, Any], Tensor]:
    torch.manual_seed(0)
    make = SoftmaxWhenEvaluated
    module = autopar.parallelize(
        make(), machine((1, 2)), batch(make), precision="fp64", manual=Manual(tp=2)
    )
    module.eval()
    return dict(module.plan.data.padded), module(**batch(make))["logits"]


def test_evaluation_that_training_did_not_foresee(workers: Pool) -> None:
    """The plan pads for training; the softmax of evaluation is over the classes there are."""
    torch.manual_seed(0)
    model, given = SoftmaxWhenEvaluated(), batch(SoftmaxWhenEvaluated)
    program = capture(model, given, training=False, precision="fp64")
    values = {n: p.detach().double() for n, p in model.named_parameters()}
    _, outputs = reference_step(program, values, given)
    for padded, logits in workers(2).run(evaluated):
        assert padded == {"embed.weight": (62, WIDTH)}
        assert logits.shape == outputs["logits"].shape
        assert error(logits, outputs["logits"]) <= TOLERANCE
