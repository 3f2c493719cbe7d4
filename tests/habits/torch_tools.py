"""Habits about torch's tools around a training step: exports, hooks, seeds, debugging, losses."""

from __future__ import annotations

import copy
import io
import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from autopar import NotSupportedError
from tests.habits.table import ALL, Run, Small, all_refused, habit, quiet

SECTION = "Tools of torch"


@habit(SECTION, "`torch.save({\"loss\": loss}, path)`, `torch.load(path)`", "a plain tensor",
       layouts=ALL)  # fmt: skip
def saved_loss(run: Run) -> None:
    run.backward(run.batch(0))
    loss = run.pm.step(**run.batch(0))
    file = io.BytesIO()
    torch.save({"loss": loss}, file)
    file.seek(0)
    found = torch.load(file)["loss"]
    assert type(found) is Tensor
    assert found == loss


@habit(SECTION, "`total += loss`, `math.exp(loss)`, `loss.numpy()`, `loss.detach_()`",
       layouts=ALL)  # fmt: skip
def loss_as_number(run: Run) -> None:
    loss = run.pm.step(**run.batch(0))
    wanted = run.alone(**run.batch(0)).item()
    total = torch.zeros((), dtype=loss.dtype)
    total += loss
    values: list[Any] = [
        total,
        loss.detach_(),
        loss.numpy(),
        loss.data.cpu().tolist(),
        min(math.inf, loss),
    ]
    assert all(abs(float(value) - wanted) < 1e-10 for value in values)
    assert abs(math.exp(loss) - math.exp(wanted)) < 1e-8


@habit(SECTION, "`torch.autograd.grad(loss, parameters)`, `torch.autograd.backward(loss)`",
       "use `.grad`", layouts=ALL, refused=(NotSupportedError, "has run backward"))  # fmt: skip
def autograd_of_loss(run: Run) -> None:
    loss = run.pm.step(**run.batch(0))
    try:
        torch.autograd.backward(loss + 1.0)
    except NotSupportedError:
        torch.autograd.grad(loss, list(run.pm.parameters()))


@habit(SECTION, "`register_multi_grad_hook(parameters, fn)`", "use `.grad` after the step",
       layouts=ALL, refused=(NotSupportedError, "register_multi_grad_hook"))  # fmt: skip
def multi_gradient_hook(run: Run) -> None:
    register_multi_grad_hook(list(run.pm.parameters()), lambda grads: None)
    run.pm.step(**run.batch(0))


@habit(SECTION, "`torch.func.functional_call(pm, other_weights, ...)`, in evaluation, too",
       "call the original model so", layouts=ALL,
       refused=(NotSupportedError, "stands in the place of"))  # fmt: skip
def functional_call(run: Run) -> None:
    weights = {name: torch.zeros_like(p) for name, p in run.pm.named_parameters()}
    run.pm.eval()
    torch.func.functional_call(run.pm, weights, (), run.batch(0))


@habit(SECTION, "per-sample gradients: `vmap(grad(functional_call))` of a copy of the model",
       "with `pm.full_state_dict()`", layouts=ALL)  # fmt: skip
def per_sample(run: Run) -> None:
    run.train(run.optimizers())
    whole = run.pm.full_state_dict()
    model = copy.deepcopy(run.model)
    if not whole:
        return
    model.load_state_dict(whole)
    found = []
    for m in (model, run.alone):

        def loss(weights: Any, ids: Tensor, targets: Tensor, m: Any = m) -> Tensor:
            batch = {"ids": ids[None], "targets": targets[None]}
            value: Tensor = torch.func.functional_call(m, weights, (), batch)
            return value

        weights = {name: p.detach() for name, p in m.named_parameters()}
        each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        found.append(each(weights, *run.batch(0).values()))
    assert all(torch.allclose(found[0][n], g, rtol=0, atol=1e-10) for n, g in found[1].items())


@habit(SECTION, "`torch.jit.script(pm)`, `torch.jit.trace(pm)`, `torch.export.export(pm)`",
       "export the original model", layouts=ALL,
       refused=(NotSupportedError, "pm.full_state_dict()"))  # fmt: skip
def exported(run: Run) -> None:
    batch = run.batch(0)
    run.pm.eval()
    all_refused(
        NotSupportedError,
        lambda: torch.jit.script(run.pm),
        lambda: torch.jit.trace(run.pm, example_kwarg_inputs=batch),
        lambda: torch.export.export(run.pm, (), batch),
        words="of which this rank has a ",
    )


@habit(SECTION, "Hogwild: `pm.share_memory()`", "torchrun starts the processes",
       refused=(NotSupportedError, "share_memory()"))  # fmt: skip
def shared_memory(run: Run) -> None:
    run.pm.share_memory()


@habit(SECTION, "`torch.autograd.set_detect_anomaly(True)`, `use_deterministic_algorithms(True)`",
       layouts=ALL)  # fmt: skip
def debugging(run: Run) -> None:
    optimizers = run.optimizers()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.set_detect_anomaly(True), quiet("Anomaly Detection"):
            run.train(optimizers)
    finally:
        torch.use_deterministic_algorithms(False)


@habit(SECTION, "`save_on_cpu()` around the step", layouts=ALL)
def saved_on_cpu(run: Run) -> None:
    optimizers = run.optimizers()
    with torch.autograd.graph.save_on_cpu():
        run.train(optimizers)


class Dropped(Small):
    def body(self, ids: Tensor) -> Tensor:
        return F.dropout(super().body(ids), 0.5, self.training)


@habit(SECTION, "`torch.manual_seed(seed)` in the loop, with dropout", "a warning: set `pm.stream`",
       kind=Dropped, layouts=ALL)  # fmt: skip
def seeded_in_loop(run: Run) -> None:
    torch.manual_seed(1)
    run.pm.stream.base, run.pm.stream.n_steps = 7, 0
    first = run.pm.step(**run.batch(0))
    torch.manual_seed(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run.pm.step(**run.batch(0)) != first
        run.pm.stream.base, run.pm.stream.n_steps = 7, 0
        assert run.pm.step(**run.batch(0)) == first
    assert sum("torch.manual_seed" in str(w.message) for w in caught) == 1
