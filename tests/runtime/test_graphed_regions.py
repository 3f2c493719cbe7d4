"""Steps of regions whose results are lost when the next step begins, as those of CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar import Manual
from autopar.runtime.execute import Environment, Executor, load_code
from autopar.runtime.launch import ThreadWorld, run_threads
from autopar.runtime.tensors import local_shard
from tests.helpers.jobs import gpt2, machine, tokens
from tests.helpers.replayed import overwrite_results

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one microbatch": (1, {"manual": Manual(), "microbatches": 1}),
    "microbatches": (1, {"manual": Manual(), "microbatches": 2}),
    "zero-1": (2, {"manual": Manual(dp=2, zero=1), "microbatches": 2}),
    "stages": (2, {"manual": Manual(pp=2), "microbatches": 4}),
}
N_STEPS = 2
OURS = "from autopar.runtime.execute import graphed"
REPLAYED = "from tests.helpers.replayed import graphed"
Result = tuple[list[float], dict[str, Tensor]]


def trained(compiling: str, layout: str) -> list[Result]:
    """Of each rank: the losses of steps that add up gradients, read at the end; the gradients."""
    n_ranks, options = LAYOUTS[layout]
    torch.manual_seed(0)
    model, batch = gpt2().double(), tokens(0)
    plan = autopar.plan(
        model, machine((1, n_ranks)), batch, precision="fp64", compile=compiling, **options
    )
    assert plan.bound is not None
    pipeline, program = plan.bound.pipeline, plan.bound.analysis.program
    texts = [text.replace(OURS, REPLAYED) for text in plan.code().values()]
    assert all(("@graphed" in text) == (compiling != "none") for text in texts)
    codes = {k: load_code(f"stage_{k}.py", text)[0] for k, text in enumerate(texts)}
    constants = {name: make() for name, make in program.constants.items()}
    given = {name: batch[info.path] for name, info in program.inputs.items()}
    values = dict(model.named_parameters())

    def run(world: ThreadWorld) -> Result:
        (k,) = pipeline.stages_of(world.rank)
        mesh = pipeline.meshes[k]
        at = mesh.coordinate(world.rank)
        groups = [world.make_groups(m) for m in pipeline.meshes][k]
        stored = {
            p.name: local_shard(values[p.mirror_of or p.name].detach(), p, mesh.sizes, at)
            .clone().requires_grad_(p.requires_grad)
            for p in pipeline.stages[k].parameters
        }  # fmt: skip
        messenger = world.messenger(rendezvous=True)
        environment = Environment(torch.device("cpu"), groups, messenger, world.world_group())
        executor = Executor(pipeline, world.rank, codes, environment, constants)
        losses = []
        for _ in range(N_STEPS):
            losses.append(executor.step(stored, given))
            assert (overwrite_results() > 0) == (compiling != "none")
        gradients = {name: p.grad for name, p in stored.items() if p.grad is not None}
        return [loss.item() for loss in losses], gradients

    return run_threads(run, pipeline.n_ranks)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # raised in inductor
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_outlives_a_step_is_copied(layout: str) -> None:
    wanted, found = trained("none", layout), trained("regions+graphs", layout)
    for (losses, gradients), (wanted_losses, wanted_gradients) in zip(found, wanted, strict=True):
        assert losses == pytest.approx(wanted_losses, abs=1e-10, rel=0)
        assert gradients.keys() == wanted_gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted_gradients[name], atol=1e-10, rtol=0)
