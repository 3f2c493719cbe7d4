"""Mutants of plan files, and whether what they say is right: as their original, or a valid plan."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn

import autopar
from autopar import Manual, Plan
from autopar.cli.summary import data_json, data_text
from autopar.cost.hardware import PROFILE_FOLDER
from autopar.mesh import Mesh
from autopar.plans import PlanData
from tests.fuzz.trees import damaged, mutated, to_json, tree_of
from tests.fuzz.watch import opening_only
from tests.helpers.jobs import machine
from tests.helpers.models.tiny_model import Tiny, batch

SECRET = "sesame_of_the_fuzz"


class Blocks(nn.Module):
    """Four equal blocks, and an input that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, n: int) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.square().sum() / n


@dataclass(frozen=True)
class Original:
    """A plan and its model. `data` is what mutants are made of."""

    name: str
    data: PlanData
    model: Callable[[], nn.Module]


@cache
def originals(own_profile: Path) -> tuple[Original, ...]:
    """Plans of each kind: one stage and two, explicit links, a shipped profile and one's own."""
    columns = [("up", (1, 2)), ("down", (1, 2))]
    made = {
        "tensor parallel": autopar.plan(
            Tiny(), machine((1, 2)), batch(0), precision="fp64", manual=Manual(tp=2, sp=True),
            microbatches=2,
        ),
        "two stages": autopar.plan(
            Tiny(), machine((1, 4)), batch(0), microbatches=2, stages=columns, forbid="data",
            mesh_shape="as-given",
        ),
        "shipped profile": autopar.plan(
            Tiny(), Mesh((2, 2), hardware="h100-sxm"), batch(0), manual=Manual(dp=4, zero=3),
            batch_dims={"x": 0},
        ),
        "own profile": autopar.plan(
            Blocks(), Mesh((1, 2), hardware=own_profile), {"x": torch.randn(4, 8), "n": 2},
            recompute="full", manual=Manual(dp=2), microbatches=2,
        ),
    }  # fmt: skip
    models = {"own profile": Blocks}
    return tuple(Original(name, plan.data, models.get(name, Tiny)) for name, plan in made.items())


def write_profile(folder: Path) -> Path:
    """A profile that is not shipped, with a text that no error may show."""
    path = folder / "own.toml"
    text = (PROFILE_FOLDER / "cpu-local.toml").read_text().replace('"cpu-local"', '"own box"')
    path.write_text(f"# {SECRET}\n{text}")
    return path


def mutant(original: Original, number: int, profile: Path) -> bytes:
    """Mutant `number` of a plan file; `profile` is a path that it may name."""
    random = Random(f"plan {original.name} {number}")
    content = original.data.to_json().encode()
    if random.random() < 0.25:
        return damaged(content, random)
    tree = tree_of(json.loads(content))
    mutated(tree, random, (str(profile), str(profile.parent)))
    written = to_json(tree).encode("utf-8", "surrogatepass")
    return damaged(written, random) if random.random() < 0.05 else written


def used(original: Original, file: Path, profile: Path) -> str | None:
    """What is wrong with a mutant in `file`, None if it is right; raises what binding it raises."""
    with opening_only(str(file).__eq__):
        plan = Plan.load(file)
        data_text(plan.data)
        json.dumps(data_json(plan.data))
    if meaning(plan.data) == meaning(original.data):
        return None
    outside = str(profile.parent)
    with opening_only(lambda path: not path.startswith(outside)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bound = plan.bind(original.model())
        assert bound.bound is not None
        _ = bound.bound.pipeline
        seconds, words = bound.predicted.step_time_s, bound.explain()
    if SECRET in words:
        return "a file that it names is shown"
    return None if math.isfinite(seconds) and seconds >= 0 else f"a step takes {seconds}"


def meaning(data: PlanData) -> PlanData:
    """A plan without what is only for the reader, and without the order of names."""
    return replace(
        data, objective_s=0.0, stage_gap=0.0, bound_s=None, chosen="", alternatives=(),
        comments={}, recipe="", model="", forbid=tuple(sorted(set(data.forbid))), ruled_out={},
    )  # fmt: skip
