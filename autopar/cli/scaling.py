"""`autopar simulate CONFIG.json --scale`: weak scaling of a recipe over numbers of nodes.

Prices come from the transformer model of `cost/transformer/`. It needs a model's dims and no
program, so 16,384 devices cost as little as 8. Fields that the recipe leaves out take defaults,
which are printed with the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.models import read_config
from autopar.cli.options import PlanRequest, parse_counts
from autopar.cli.shell import Result, progress, writing
from autopar.errors import OptionError

if TYPE_CHECKING:
    from autopar.cost.transformer import Recipe

DEVICES_PER_NODE = 8
_ORDERS = ("1f1b", "gpipe", "interleaved", "zero-bubble")
_RECOMPUTED = ("none", "selective", "attention-core", "full")
# Planning flags that also apply without a plan.
_MEANT = ("recompute", "schedule")


@dataclass(frozen=True)
class ScaleRequest:
    """The flags of `--scale`; `recipe` holds the fields of a `Recipe` that the user set."""

    nodes: tuple[int, ...] | None = None
    devices_per_node: int | None = None
    recipe: dict[str, Any] = field(default_factory=dict)

    def refuse(self) -> None:
        """Raises `OptionError` if any flag was given: a plan has a mesh and a recipe of its own."""
        given = [name for name in ("nodes", "devices_per_node") if getattr(self, name)]
        if flags := ", ".join(_flag(name) for name in (*given, *self.recipe)):
            raise OptionError(
                f"{flags}: only for --scale of a config.json, without --mesh",
                hint="a plan's recipe is --manual tp=8,zero=1",
            )


def _flag(name: str) -> str:
    words = {"microbatch_size": "microbatch"}
    return f"--{words.get(name, name).replace('_', '-')}"


def scale_flags(
    *,
    nodes: Annotated[
        str | None, typer.Option(metavar="N,N", help="With --scale: numbers of nodes, as 1,8,64.")
    ] = None,
    devices_per_node: Annotated[
        int | None, typer.Option(min=1, help="With --scale; default 8.")
    ] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="With --scale: tensor parallelism.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="With --scale: stages.")] = None,
    cp: Annotated[int | None, typer.Option(min=1, help="With --scale: over the sequence.")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="With --scale: over experts.")] = None,
    sp: Annotated[bool, typer.Option("--sp", help="With --scale: sequence parallelism.")] = False,
    zero: Annotated[
        int | None, typer.Option(min=0, max=3, help="With --scale: 0, 1, 2 or 3.")
    ] = None,
    microbatch: Annotated[
        int | None, typer.Option(min=1, help="With --scale: rows of one microbatch.")
    ] = None,
    interleave: Annotated[
        int | None, typer.Option(min=1, help="With --scale: chunks per device.")
    ] = None,
) -> ScaleRequest:
    recipe = {
        "tp": tp, "pp": pp, "cp": cp, "ep": ep, "sp": sp or None, "zero": zero,
        "microbatch_size": microbatch, "interleave": interleave,
    }  # fmt: skip
    set_by_user = {name: value for name, value in recipe.items() if value is not None}
    counts = None if nodes is None else parse_counts(nodes)
    return ScaleRequest(counts, devices_per_node, set_by_user)


def scale_config(
    subject: str,
    request: PlanRequest,
    scale: ScaleRequest,
    what_if: Sequence[str],
    svg: Path | None,
) -> Result:
    """Weak scaling of a configuration's model, on the given hardware and on changed ones."""
    _refuse_others(subject, request)
    assert request.seq is not None and request.hardware is not None
    from autopar.cost.hardware import changed, load_profile
    from autopar.cost.transformer import default_nodes, shape_of, training_dtype, weak_scaling
    from autopar.report import scaling_svg, scaling_text

    shape = shape_of(read_config(Path(subject)), request.seq)
    recipe, profile = _recipe(request, scale), load_profile(request.hardware)
    each = scale.devices_per_node or DEVICES_PER_NODE
    nodes = scale.nodes or default_nodes(recipe, each)
    scalings = []
    with progress("simulating") as report:
        for machine in (profile, *(changed(profile, text) for text in what_if)):
            report(machine.name)
            scalings.append(weak_scaling(shape, recipe, machine, nodes, each, request.batch))
    dtype = str(training_dtype(profile)).removeprefix("torch.")
    title = f"{Path(subject).name}: {_recipe_text(recipe)}, {dtype}, rows of {request.seq} tokens"
    written = []
    if svg is not None:
        with writing():
            svg.write_text(scaling_svg(title, scalings), encoding="utf-8")
        written.append(str(svg))
    data = {
        "shape": asdict(shape), "recipe": _recipe_dict(recipe), "dtype": dtype,
        "devices_per_node": each,
        "scalings": [asdict(scaling) for scaling in scalings], "written": written,
    }  # fmt: skip
    text = "\n\n".join([title, scaling_text(scalings), *written])
    return Result(text, data)


def _refuse_others(subject: str, request: PlanRequest) -> None:
    """Without a mesh, refuse what a recipe and a model's dims cannot use."""
    if not subject.endswith(".json"):
        raise OptionError(
            f"{subject} is no config.json, and --scale without --mesh needs its dims",
            hint="--mesh 2x8 plans it; --scale then doubles the speed of each part of the machine",
        )
    unused = [name for name in request.given if name not in _MEANT]
    if unused := [*unused, *(["loss"] if request.loss is not None else [])]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        raise OptionError(f"{flags}: --scale makes no plan", hint="leave it out, or give a --mesh")
    if request.seq is None or request.seq < 1:
        raise OptionError("--scale needs the tokens of a row", hint="--seq 4096")
    if request.hardware is None:
        raise OptionError("--scale needs a machine to scale", hint="--hardware h100-sxm")
    if request.batch is not None and request.batch < 1:
        raise OptionError(f"--batch {request.batch}: sizes are at least 1")


def _recipe(request: PlanRequest, scale: ScaleRequest) -> Recipe:
    from autopar.cost.transformer import Recipe

    n_chunks = scale.recipe.get("interleave", 1)
    order = request.given.get("schedule", "auto")
    if order == "auto":
        order = "interleaved" if n_chunks > 1 else "1f1b"
    if order not in _ORDERS or (order == "interleaved") != (n_chunks > 1):
        raise OptionError(
            f"--schedule {order} with --interleave {n_chunks}",
            hint=f"one of {', '.join(_ORDERS)}; only interleaved has several chunks",
        )
    recompute = request.given.get("recompute", "none")
    if recompute not in _RECOMPUTED:
        raise OptionError(f"--recompute {recompute}", hint=f"one of {', '.join(_RECOMPUTED)}")
    # A placeholder of one microbatch: `weak_scaling` sets the batch for each number of nodes.
    batch = scale.recipe.get("microbatch_size", 1)
    return Recipe(**scale.recipe, global_batch=batch, order=order, recompute=recompute)


def _recipe_dict(recipe: Recipe) -> dict[str, Any]:
    """The fields that are the same for all numbers of nodes."""
    grows = ("dp", "global_batch")
    return {name: value for name, value in asdict(recipe).items() if name not in grows}


def _recipe_text(recipe: Recipe) -> str:
    degrees = {"tp": recipe.tp, "pp": recipe.pp, "cp": recipe.cp, "ep": recipe.ep}
    words = [f"{name}={size}" for name, size in degrees.items() if size > 1 or name in ("tp", "pp")]
    words += ["sp"] * recipe.sp + [f"zero={recipe.zero}", f"microbatch {recipe.microbatch_size}"]
    if recipe.pp > 1:
        words.append(recipe.order)
    if recipe.recompute != "none":
        words.append(f"recompute {recipe.recompute}")
    return ", ".join(words)
