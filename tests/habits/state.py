"""Habits about state: saving and loading, layers as the module shows them, the original model."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

import autopar
from autopar import NotSupportedError, StateError
from tests.habits.table import BOTH, Run, adamw, all_refused, habit
from tests.habits.table import STAGES_FIRST as ALL

SECTION = "State and checkpoints"
LAYERS = "Layers of the module"
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def shared_folder() -> Path:
    """A new folder, the same on every rank."""
    held = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(held)
    assert held[0] is not None
    return Path(held[0])


def in_layout(run: Run, layout: str) -> Run:
    """The same training in another layout, with weights as at the beginning."""
    other = Run(layout, dict(run.options), run.kind)
    other.alone.load_state_dict(run.alone.state_dict())
    return other


@habit(SECTION, '`torch.save(pm.state_dict(), f"rank{r}.pt")` on every rank, and back', layouts=ALL)
def saved_shards(run: Run) -> None:
    for weights_only in (True, False):
        path = shared_folder() / f"rank{dist.get_rank()}.pt"
        optimizers = run.optimizers()
        run.train(optimizers, 1)
        torch.save(run.pm.state_dict(), path)
        kept = copy.deepcopy(run.alone.state_dict())
        run.train(optimizers, 1)
        run.pm.load_state_dict(torch.load(path, weights_only=weights_only))
        run.alone.load_state_dict(kept)
        run.train(run.optimizers())


@habit(SECTION, "the file of rank 0 loaded by all ranks", "it has the shards of one rank",
       layouts=ALL, refused=(StateError, ""))  # fmt: skip
def saved_shards_of_one(run: Run) -> None:
    path = shared_folder() / "model.pt"
    values = run.pm.state_dict()
    if dist.get_rank() == 0:
        torch.save(values, path)
    dist.barrier()
    run.pm.load_state_dict(torch.load(path))


@habit(SECTION, "`torch.save(pm.full_state_dict(), path)` on rank 0, `model.load_state_dict`",
       layouts=ALL)  # fmt: skip
def saved_whole(run: Run) -> None:
    path = shared_folder() / "model.pt"
    run.train(run.optimizers())
    whole = run.pm.full_state_dict()
    if dist.get_rank() == 0:
        torch.save(whole, path)
    dist.barrier()
    run.model.load_state_dict(torch.load(path))
    for name, value in run.model.state_dict().items():
        assert torch.allclose(value, run.alone.state_dict()[name], rtol=0, atol=1e-10), name


@habit(SECTION, "`torch.save(pm)`, `pickle.dumps(pm)`", "save `pm.full_state_dict()`", layouts=ALL,
       refused=(NotSupportedError, "autopar.save"))  # fmt: skip
def pickled(run: Run) -> None:
    pickle.dumps(run.pm)


@habit(SECTION, '`torch.save({"opt": optimizer.state_dict()}, path)`', "use `autopar.save`",
       layouts=ALL, refused=(NotSupportedError, "autopar.save(pm, optimizer, path)"))  # fmt: skip
def pickled_optimizer(run: Run) -> None:
    optimizers = run.optimizers()
    run.train(optimizers, 1)
    pickle.dumps(optimizers[0].state_dict())


@habit(SECTION, "`pm.state_dict()[name].full_tensor()`", layouts=BOTH)
def full_tensors(run: Run) -> None:
    run.train(run.optimizers(), 1)
    values, wanted = run.pm.state_dict(prefix="model."), run.alone.state_dict()
    assert list(values) == [f"model.{name}" for name in wanted]
    for name, value in wanted.items():
        whole = values[f"model.{name}"].full_tensor()
        assert torch.allclose(whole, value, rtol=0, atol=1e-10)


@habit(SECTION, "`pm.load_state_dict(whole tensors)` on every rank, on rank 0, `strict=False`",
       layouts=ALL)  # fmt: skip
def loaded_whole(run: Run) -> None:
    torch.manual_seed(5)
    for keep in (lambda n: True, lambda n: "head" in n):
        values = {n: torch.randn_like(v) for n, v in run.alone.state_dict().items() if keep(n)}
        expected = run.alone.load_state_dict(values, strict=False)
        given = values if len(values) < 3 or dist.get_rank() == 0 else {}
        assert run.pm.load_state_dict(given, strict=False).missing_keys == expected.missing_keys
        run.train(run.optimizers(), 1)


@habit(SECTION, "`load_state_dict(...)` with wrong shapes, even with `strict=False`",
       "as `nn.Module` does", layouts=ALL, refused=(StateError, "head.weight"))  # fmt: skip
def loaded_wrong(run: Run) -> None:
    values = run.alone.state_dict()
    run.pm.load_state_dict({**values, "head.weight": values["head.weight"][:3]}, strict=False)


@habit(SECTION, "`load_state_dict(..., assign=True)`", "leave it out: values are copied",
       refused=(NotSupportedError, "assign"))  # fmt: skip
def assigned(run: Run) -> None:
    run.pm.load_state_dict(run.alone.state_dict(), assign=True)


@habit(SECTION, "`state_dict(keep_vars=True)`", "use `pm.named_parameters()`",
       refused=(NotSupportedError, "keep_vars"))  # fmt: skip
def kept_vars(run: Run) -> None:
    run.pm.state_dict(keep_vars=True)


@habit(SECTION, "`optimizer.load_state_dict` of one process's checkpoint", "cut to shards")
def loaded_optimizer(run: Run) -> None:
    makers: tuple[Callable[[Any], Any], ...] = (
        adamw,
        lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    )
    for make in makers:
        alone = make(run.alone.parameters())
        run.alone(**run.batch(7)).backward()
        run.update([alone])
        run.pm.load_state_dict(run.alone.state_dict())
        optimizer = make(run.pm.parameters())
        optimizer.load_state_dict(copy.deepcopy(alone.state_dict()))
        run.train([optimizer, alone])


class App(Stateful):
    """`AppState` of PyTorch's tutorial on distributed checkpoints."""

    def __init__(self, model: Any, optimizer: Any, options: StateDictOptions | None) -> None:
        self.model, self.optimizer, self.options = model, optimizer, options

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
            options=self.options,
        )


def through_dcp(run: Run, layout: str, options: StateDictOptions | None, save: Any) -> None:
    """Train, save, load in another layout, and train on."""
    folder = shared_folder() / "app"
    optimizers = run.optimizers()
    run.train(optimizers)
    save({"app": App(run.pm, optimizers[0], options)}, checkpoint_id=folder)
    other = in_layout(run, layout)
    optimizer = adamw(other.pm.parameters())
    dcp.load({"app": App(other.pm, optimizer, options)}, checkpoint_id=folder)
    alone = adamw(other.alone.parameters())
    alone.load_state_dict(optimizers[1].state_dict())
    other.train([optimizer, alone], 2, first=2)
    other.check()


@habit(SECTION, "`dcp.save`, `dcp.load` of `get_state_dict(pm, optimizer)`, into any layout")
def distributed_checkpoint(run: Run) -> None:
    through_dcp(run, "zero3" if run.layout == "tp" else "tp", None, dcp.save)


@habit(SECTION, "`dcp.async_save` of it")
def asynchronous_checkpoint(run: Run) -> None:
    def save(state: Any, **where: Any) -> None:
        saving: Any = dcp.async_save(state, **where)
        saving.result()

    through_dcp(run, run.layout, None, save)


@habit(SECTION, "the same with pipeline stages, `flatten_optimizer_state_dict=True`", layouts=ALL)
def flat_checkpoint(run: Run) -> None:
    through_dcp(run, "pp" if run.layout == "tp" else "tp", FLAT, dcp.save)


@habit(SECTION, '`dcp.save({"opt": optimizer.state_dict()})` with pipeline stages',
       "use `get_optimizer_state_dict`", layouts=("pp",),
       refused=(NotSupportedError, "get_optimizer_state_dict"))  # fmt: skip
def counted_checkpoint(run: Run) -> None:
    optimizers = run.optimizers()
    run.train(optimizers, 1)
    state = optimizers[0].state_dict()["state"]
    for index, values in state.items():
        values["exp_avg"].__create_write_items__(f"opt.state.{index}.exp_avg", None)


@habit(SECTION, "`get_model_state_dict(pm, StateDictOptions(full_state_dict=True))`", layouts=BOTH)
def full_of_dcp(run: Run) -> None:
    run.train(run.optimizers(), 1)
    for offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        found: dict[str, Any] = get_model_state_dict(run.pm, options=options)
        if dist.get_rank() == 0:
            run.model.load_state_dict(found)
            for name, value in run.alone.state_dict().items():
                assert torch.allclose(found[name], value, rtol=0, atol=1e-10), name


@habit(SECTION, "`autopar.save`, `autopar.load` of Adafactor and Muon, into another layout",
       optimizer_gather=["*"])  # fmt: skip
def gathered_checkpoint(run: Run) -> None:
    makers: tuple[Callable[[Any], Any], ...] = (
        lambda p: torch.optim.Adafactor(p, lr=1e-2),
        lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=1e-2, momentum=0.9),
    )
    for make in makers:
        folder = shared_folder() / "checkpoint"
        optimizers = run.optimizers(make)
        run.train(optimizers)
        extra = {"scale": 2.0, "schedule": {"last_epoch": 3}}
        autopar.save(run.pm, optimizers[0], folder, step=2, extra=extra)
        other = in_layout(run, "zero3" if run.layout == "tp" else "tp")
        found = make(other.pm.parameters())
        assert autopar.load(other.pm, found, folder) == (2, extra)
        alone = make(other.alone.parameters())
        alone.load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
        other.train([found, alone], 2, first=2)
        other.check()


@habit(SECTION, "`model.load_state_dict(...)` after `autopar.parallelize`, on the old model",
       "`pm.load_state_dict(...)`", layouts=ALL, refused=(StateError, "copied them"))  # fmt: skip
def loaded_into_original(run: Run) -> None:
    assert run.pm.training
    run.model.load_state_dict({n: v + 1 for n, v in run.model.state_dict().items()})
    run.pm.step(**run.batch(0))


@habit(SECTION, "`full_state_dict()` in evaluation, `torch.inference_mode()`, `pm.train(False)`",
       layouts=ALL)  # fmt: skip
def in_evaluation(run: Run) -> None:
    optimizers = run.optimizers()
    for step in range(2):
        run.train(optimizers, 1, first=step)
        assert run.pm.train(False) is run.pm
        with torch.inference_mode():
            found, wanted = run.pm(**run.batch(9)), run.alone(**run.batch(9))
        assert abs(found - wanted) < 1e-10
        run.pm.full_state_dict()
        run.pm.train()


@habit(LAYERS, "groups by layers: `pm.head.parameters()`, `pm.blocks[0]`, `pm.get_parameter(n)`")
def groups_of_layers(run: Run) -> None:
    optimizers = []
    for m in run.both():
        assert m.get_parameter("head.weight") is m.get_submodule("head").weight
        head = {"params": m.head.parameters(), "lr": 1e-2}
        blocks = {"params": [p for b in m.blocks[:2] for p in b.parameters()], "lr": 1e-3}
        optimizers.append(torch.optim.AdamW([head, blocks]))
    run.train(optimizers)


@habit(LAYERS, "weight decay by kind: `isinstance(m, nn.LayerNorm)`, `named_children()`",
       layouts=ALL)  # fmt: skip
def groups_by_kind(run: Run) -> None:
    def decayed(module: nn.Module) -> list[Any]:
        own = [] if isinstance(module, nn.LayerNorm) else list(module._parameters.values())
        return own + [p for _, child in module.named_children() for p in decayed(child)]

    optimizers = []
    for m in run.both():
        assert [n for n, _ in m.named_modules()] == [n for n, _ in run.alone.named_modules()]
        with_decay = {id(p) for p in decayed(m)}
        groups = [[p for p in m.parameters() if (id(p) in with_decay) is w] for w in (True, False)]
        options = (
            {"params": g, "weight_decay": w} for g, w in zip(groups, (0.5, 0.0), strict=True)
        )
        optimizers.append(torch.optim.AdamW([o for o in options if o["params"]], lr=1e-2))
    run.train(optimizers)


@habit(LAYERS, "freezing layers: `for p in pm.embed.parameters(): p.requires_grad_(False)`",
       layouts=ALL)  # fmt: skip
def frozen_layers(run: Run) -> None:
    optimizers = run.optimizers()
    for m in run.both():
        m.embed.requires_grad_(False)
        for block in m.blocks[:1]:
            for p in block.parameters():
                p.requires_grad = False
    run.train(optimizers)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "pm.foo = nn.Linear(2, 2)": lambda pm: setattr(pm, "foo", nn.Linear(2, 2)),
    "pm.head = nn.Linear(2, 2)": lambda pm: setattr(pm, "head", nn.Linear(2, 2)),
    "pm.foo = nn.Parameter(...)": lambda pm: setattr(pm, "foo", nn.Parameter(torch.ones(2))),
    "pm.add_module": lambda pm: pm.add_module("foo", nn.Linear(2, 2)),
    "pm.register_buffer": lambda pm: pm.register_buffer("foo", torch.ones(2)),
    "del pm.head": lambda pm: delattr(pm, "head"),
    "pm.blocks.append(layer)": lambda pm: pm.blocks.append(nn.Linear(2, 2)),
    "pm.blocks[0].norm.eps = 1.0": lambda pm: setattr(pm.blocks[0].norm, "eps", 1.0),
    "pm.head(x)": lambda pm: pm.head(torch.ones(2)),
    "pm.head.register_forward_hook": lambda pm: pm.head.register_forward_hook(lambda *a: None),
}


@habit(LAYERS, ", ".join(f"`{change}`" for change in CHANGES), "change the model before",
       layouts=ALL, refused=(NotSupportedError, "program is generated"))  # fmt: skip
def changed_layers(run: Run) -> None:
    all_refused(NotSupportedError, *(partial(change, run.pm) for change in CHANGES.values()))


@habit(LAYERS, "`pm.get_submodule(n).eval()`: one layer in another mode",
       "set the mode of the layer before", layouts=ALL,
       refused=(NotSupportedError, "captured in training mode"))  # fmt: skip
def mode_of_a_layer(run: Run) -> None:
    run.pm.get_submodule("blocks.0").eval()
    run.pm.step(**run.batch(0))
