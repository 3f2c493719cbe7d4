"""Planning options as flags, shared by all commands that plan.

`takes_planning_options` gives a command the flags of `_planning_flags`, and passes them on as one
`PlanRequest`. `autopar.options.Options` checks the values; this file only parses texts:

    mesh     "2x8", "4"                        sizes
    bytes    "40GiB", "40GB", "1024B"          binary and decimal units
    manual   "dp=2,tp=4,sp,zero=1"             `Manual`'s fields; a bare word is True
    force    "h.0.mlp.c_fc.weight=S(0)@1"      repeated
    stages   "2", or "wte,h.0@1x2;h.1,ln_f@1x2"   modules of each stage, and its devices
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.shell import set_parameters
from autopar.errors import OptionError

if TYPE_CHECKING:
    from autopar.manual import Manual
    from autopar.mesh import Mesh

LossOption = Annotated[
    str | None, typer.Option(metavar="package:fn", help="fn(outputs, batch) -> loss.")
]


@dataclass(frozen=True)
class PlanRequest:
    """The planning flags of one command. `given` holds those that the user set."""

    mesh: str | None
    hardware: str | None
    batch: int | None
    seq: int | None
    loss: str | None = None
    given: dict[str, Any] = field(default_factory=dict)

    def machine(self) -> Mesh:
        """The requested mesh. Raises `OptionError` if there is none."""
        from autopar.mesh import Mesh

        if self.mesh is None:
            raise OptionError("a mesh is needed to plan", hint="--mesh 2x8, or --mesh 4")
        if self.hardware is not None:  # a wrong name is told before a model is built
            from autopar.cost.hardware import load_profile

            load_profile(self.hardware)
        return Mesh(parse_mesh(self.mesh), hardware=self.hardware)

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `autopar.plan`."""
        out = dict(self.given)
        readers: dict[str, Callable[[Any], Any]] = {
            "microbatches": parse_count, "stages": parse_stages,
            "mesh_shape": parse_degrees, "manual": parse_manual, "force": parse_force,
            "forbid": parse_forbid,
        }  # fmt: skip
        return out | {name: readers[name](out[name]) for name in readers if name in out}


def _planning_flags(
    *,
    mesh: Annotated[str | None, typer.Option(help="Nodes x devices per node, as 2x8.")] = None,
    hardware: Annotated[str | None, typer.Option(help="Profile name, or a .toml file.")] = None,
    batch: Annotated[int | None, typer.Option(help="Rows of the global batch.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens per row.")] = None,
    loss: LossOption = None,
    microbatches: Annotated[str | None, typer.Option(help="auto, or how many.")] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="auto, gpipe, 1f1b, interleaved, zero-bubble, zero-bubble-v or dualpipe-v."
        ),
    ] = None,
    stages: Annotated[
        str | None, typer.Option(help="auto, how many, or MODULES@1x2;MODULES@1x2.")
    ] = None,
    mesh_shape: Annotated[
        str | None, typer.Option(help="auto, as-given, or dp=2,cp=2,tp=4.")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw, sgd or adam.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="model, bf16-mixed, bf16-autocast, fp16-mixed or fp64.")
    ] = None,
    reduce_dtype: Annotated[
        str | None, typer.Option(help="Of gradients in mixed precision: float32, or bfloat16.")
    ] = None,
    master_weights: Annotated[
        bool,
        typer.Option("--master-weights", help="A half-precision model's in float32."),
    ] = False,
    memory_limit: Annotated[str | None, typer.Option(help="Per device, as 40GiB.")] = None,
    memory_margin: Annotated[
        float | None, typer.Option(help="A share of the device to leave free, as 0.1.")
    ] = None,
    recompute: Annotated[
        str | None, typer.Option(help="auto, none, gathers, selective, attention-core or full.")
    ] = None,
    imbalance: Annotated[
        float | None, typer.Option(help="Rows of the fullest expert over the mean (1.0).")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Of packed documents: 1024:0.5,8192:0.5.")
    ] = None,
    software: Annotated[
        str | None, typer.Option(help="What prices assume: autopar, transformer-engine ...")
    ] = None,
    compiled: Annotated[
        str | None, typer.Option("--compile", help="none, regions, regions+graphs or auto.")
    ] = None,
    manual: Annotated[
        str | None, typer.Option(help="A recipe: dp=2,pp=2,interleave=2,sp,zero=1.")
    ] = None,
    force: Annotated[
        list[str] | None, typer.Option(help="Pin a parameter: NAME=S(0)@1. Repeatable.")
    ] = None,
    forbid: Annotated[
        list[str] | None, typer.Option(help="data, tensor, sequence, zero3 ... Repeatable.")
    ] = None,
    fallback: Annotated[
        str | None, typer.Option(help="Operators without a rule: error, or replicate.")
    ] = None,
    solver: Annotated[str | None, typer.Option(help="auto, or ilp.")] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Search until no plan is faster by more (0.01)."),
    ] = None,
    tie: Annotated[
        float | None,
        typer.Option(help="Take the simplest plan this close to the fastest (0.02)."),
    ] = None,
    time_limit_s: Annotated[
        float | None, typer.Option(help="Seconds: then the best plan so far (60).")
    ] = None,
) -> PlanRequest:
    given = {
        "microbatches": microbatches, "schedule": schedule, "stages": stages,
        "mesh_shape": mesh_shape, "optimizer": optimizer, "precision": precision,
        "memory_limit": memory_limit, "memory_margin": memory_margin, "recompute": recompute,
        "imbalance": imbalance, "lengths": lengths, "software": software, "compile": compiled,
        "manual": manual, "force": force or None, "forbid": forbid or None, "fallback": fallback,
        "solver": solver, "tolerance": tolerance, "tie": tie,
        "time_limit_s": time_limit_s, "reduce_dtype": reduce_dtype,
        "master_weights": master_weights or None,
    }  # fmt: skip
    set_by_user = {name: value for name, value in given.items() if value is not None}
    return PlanRequest(mesh, hardware, batch, seq, loss, set_by_user)


def takes_flags(
    name: str, read: Callable[..., Any], panel: str | None = None
) -> Callable[..., Any]:
    """Replace a command's argument `name` by the flags of `read`, which returns its value.

    `panel` is the section of the command's help that lists them.
    """
    signature = inspect.signature(read, eval_str=True)
    flags = {key: _in_panel(flag, panel) for key, flag in signature.parameters.items()}

    def wrap(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(**kwargs: Any) -> Any:
            value = read(**{flag: kwargs.pop(flag) for flag in flags})
            return command(**kwargs, **{name: value})

        own = inspect.signature(command, eval_str=True).parameters
        kept = [p for p in own.values() if p.name != name]
        set_parameters(run, [*kept, *flags.values()])
        return run

    return wrap


def _in_panel(flag: inspect.Parameter, panel: str | None) -> inspect.Parameter:
    """The same flag, in a section of the help; other commands may list it elsewhere."""
    kind, (option, *rest) = flag.annotation.__origin__, flag.annotation.__metadata__
    option = copy(option)
    option.rich_help_panel = panel
    return flag.replace(annotation=Annotated[(kind, option, *rest)])


def takes_planning_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a command's `request: PlanRequest` by the planning flags, a panel of its help."""
    return takes_flags("request", _planning_flags, "Planning options")(command)


def parse_mesh(text: str) -> tuple[int, ...]:
    """`2x8` -> (2, 8)."""
    if not re.fullmatch(r"\d+(x\d+)*", text):
        raise OptionError(
            f"{text!r} is not a mesh", hint="nodes x devices per node, as --mesh 2x8 or --mesh 4"
        )
    return tuple(int(size) for size in text.split("x"))


def parse_count(text: str) -> int | str:
    """`4` -> 4; other words are returned unchanged."""
    return int(text) if text.isdigit() else text


def parse_counts(text: str) -> tuple[int, ...]:
    """`2,4` -> (2, 4)."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise OptionError(f"{text!r} is not a list of counts", hint="as --ranks 2,4")
    return tuple(int(count) for count in text.split(","))


def parse_stages(text: str) -> int | str | list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """`wte,h.0@1x2;h.1,ln_f@2` -> [(("wte", "h.0"), (1, 2)), (("h.1", "ln_f"), (1, 2))]."""
    if "@" not in text:
        return parse_count(text)
    stages = []
    for stage in text.split(";"):
        modules, _, shape = stage.partition("@")
        sizes = parse_mesh(shape.strip())
        names = tuple(name.strip() for name in modules.split(",") if name.strip())
        stages.append((names, (1, *sizes) if len(sizes) == 1 else sizes))
    return stages


def parse_degrees(text: str) -> str | dict[str, Any]:
    """`dp=2,tp=4` -> {"dp": 2, "tp": 4}; words stay words."""
    pairs = [word.partition("=") for word in text.split(",")]
    if not any(equals for _, equals, _ in pairs):
        return text
    return {name.strip(): _scalar(value.strip()) for name, _, value in pairs}


def parse_manual(text: str) -> Manual:
    """`dp=2,tp=4,sp` -> Manual(dp=2, tp=4, sp=True)."""
    from dataclasses import fields

    from autopar.manual import Manual

    known = {f.name for f in fields(Manual)}
    values: dict[str, Any] = {}
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if re.search(r"\s", f"{name}{value}"):
            divided = re.sub(r"[\s,]+", ",", text.strip())
            raise OptionError(
                f"--manual {text!r} has spaces where commas belong",
                hint=f"write --manual {divided}",
            )
        if name not in known:
            raise OptionError(
                f"the manual recipe has no {name!r}; it has {', '.join(sorted(known))}",
                hint="write --manual dp=2,tp=4,sp,zero=1",
            )
        values[name] = _scalar(value) if equals else True
    return Manual(**values)


def _scalar(text: str) -> int | bool | str:
    words = {"true": True, "false": False}
    return words.get(text.lower(), int(text) if text.isdigit() else text)


def parse_force(texts: list[str]) -> dict[str, list[str]]:
    """`NAME=PIN` texts -> pins by parameter."""
    pins: dict[str, list[str]] = {}
    for text in texts:
        name, equals, pin = text.partition("=")
        if not equals:
            raise OptionError(f"{text!r} pins nothing", hint='write --force "NAME=S(0)@1"')
        pins.setdefault(name.strip(), []).append(pin.strip())
    return pins


def parse_forbid(texts: list[str]) -> tuple[str, ...]:
    """`["data,zero3", "tensor"]` -> the words."""
    return tuple(word.strip() for text in texts for word in text.split(",") if word.strip())
