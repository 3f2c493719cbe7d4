"""Mutants of hardware profiles, and whether a plan can be priced on what they say."""

from __future__ import annotations

import json
import math
import tomllib
import warnings
from pathlib import Path
from random import Random
from typing import Any

from autopar import Plan
from autopar.cost.hardware import PROFILE_FOLDER, load_profile
from autopar.mesh import Mesh
from tests.fuzz.plans import Original
from tests.fuzz.trees import Members, Raw, damaged, mutated, tree_of
from tests.fuzz.watch import opening_only

NAMES = ("cpu-local", "h100-sxm", "v100-16gb", "b200")


def mutant(number: int) -> bytes:
    """Mutant `number` of a shipped profile."""
    random = Random(f"profile {number}")
    content = (PROFILE_FOLDER / f"{random.choice(NAMES)}.toml").read_bytes()
    if random.random() < 0.3:
        return damaged(content, random)
    tree = tree_of(tomllib.loads(content.decode()))
    mutated(tree, random)
    return _to_toml(tree).encode("utf-8", "surrogatepass")


def used(original: Original, file: Path) -> str | None:
    """Price a plan on a mutant; says what is wrong, None if it is right."""
    with opening_only(str(file).__eq__):
        profile = load_profile(file)
    if not all(math.isfinite(q.value) and q.value >= 0 for q in profile.quantities.values()):
        return "a figure is not finite"
    mesh = Mesh(original.data.mesh.shape, hardware=file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bound = Plan(original.data).bind(original.model(), mesh)
        seconds = bound.predicted.step_time_s
    return None if math.isfinite(seconds) and seconds > 0 else f"a step takes {seconds}"


def _to_toml(tree: Any) -> str:
    """TOML of inline tables: dotted keys as JSON strings."""
    if not isinstance(tree, Members):
        return f"x = {_value(tree)}\n"
    return "".join(f"{json.dumps(key)} = {_value(value)}\n" for key, value in tree)


def _value(tree: Any) -> str:
    if isinstance(tree, Members):
        return "{" + ", ".join(f"{json.dumps(k)} = {_value(v)}" for k, v in tree) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(_value, tree)) + "]"
    if isinstance(tree, Raw):
        return tree.text
    if isinstance(tree, float) and not math.isfinite(tree):
        return str(tree)
    return json.dumps(tree, ensure_ascii=False)
