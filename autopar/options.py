"""The options of `plan`, `parallelize` and `verify`: values, defaults and what is refused.

`Options.of(**kwargs)` checks each option by its entry in `_CHECKS`. It then checks options that
may contradict each other. A value that is not allowed raises `OptionError`, a documented value that
is not built raises `NotSupportedError`. No option is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

from autopar.errors import OptionError
from autopar.lengths import Lengths, parse_lengths
from autopar.manual import MODES, Manual, Recompute
from autopar.mesh import check_mesh_shape
from autopar.option_values import (
    check_count,
    check_word,
    closest,
    is_int,
    loss_function,
    one_of,
    parse_bytes,
    positive,
    share,
)
from autopar.placement import Pin, parse_pins
from autopar.precision import Precision
from autopar.schedule import CHUNKS

# Options that a plan records for its prices; they may be given anew beside it.
PRICED = frozenset({"imbalance", "lengths", "software"})
# Options beside a plan, which decide nothing: user code, or of planning, running and prices alone.
BESIDE_A_PLAN = PRICED | {"loss_fn", "optimizer_gather", "progress", "check_every", "compile"}
# Shipped with their constants by `cost/hardware/stacks`; a test compares the two.
SOFTWARE = (
    "autopar", "megatron-2021", "megatron-core", "megatron-deepspeed", "torch-compiled",
    "torch-eager", "transformer-engine",
)  # fmt: skip
OPTIMIZERS = ("adamw", "sgd", "adam")
REDUCE_DTYPES = ("float32", "bfloat16", "float16")
FORBIDDABLE = tuple("data tensor sequence expert pipeline zero1 zero2 zero3 recompute".split())
# Other names of what can be forbidden.
_ALSO_CALLED = {
    "dp": "data", "ddp": "data", "tp": "tensor", "sp": "sequence", "cp": "sequence",
    "ep": "expert", "pp": "pipeline", "stages": "pipeline", "fsdp": "zero3", "zero": "zero3",
    "checkpointing": "recompute",
}  # fmt: skip
# What is no option -> where it belongs.
_ELSEWHERE = {
    "hardware": 'give it to the mesh: autopar.Mesh((2, 8), hardware="h100-sxm")',
    "zero": "manual=autopar.Manual(zero=...); without it, the search chooses",
    "tp": 'mesh_shape={"tp": ...}, or manual=autopar.Manual(tp=...)',
    "dp": 'mesh_shape={"dp": ...}, or manual=autopar.Manual(dp=...)',
    "pp": "stages=..., or manual=autopar.Manual(pp=...)",
}


@dataclass(frozen=True)
class StageOption:
    """One stage of `stages=[...]`: its modules and its submesh (nodes, devices per node)."""

    modules: tuple[str, ...]
    mesh_shape: tuple[int, int]

    @property
    def n_ranks(self) -> int:
        return math.prod(self.mesh_shape)


@dataclass(frozen=True)
class Options:
    """Checked options; make them with `Options.of`.

    `mesh_shape`     "auto" (every dp x tp; dp x cp x tp where rows are few), "as-given", or degrees
                     that every stage has, as {"tp": 4}; others may be left open, as {"cp": 2}
    `memory_limit`   bytes per device, or "40GiB"; None: the hardware's memory less a margin
    `memory_margin`  the margin, a share of the device's memory; None: the one of the hardware
    `tolerance`      relative; the search ends once no plan can be faster by more
    `tie`            relative; among plans this close to the fastest the simplest is chosen
    `time_limit_s`   seconds of planning, with capture; the search has a third of them at least.
                     Then it returns the best plan so far, with its gap; None: it goes on to its end
    `batch_dims`     input path -> the dim that counts samples, None for an input without one;
                     inferred for inputs that are not named
    `fallback`       what to do with operators without a rule (`passes/analysis/fallback.py`)
    `reduce_dtype`   of gradients across ranks and microbatches, where parameters are used in
                     another dtype than they are stored in; None: float32
    `master_weights`  with precision="model": parameters of a half-precision model are stored,
                     reduced and optimised in float32, as in mixed precision
    `optimizer_gather`  names or patterns (`*`) of parameters that operators of an optimizer, or of
                     user code, may gather whole (`runtime/tensors`)
    `imbalance`      rows of the fullest expert over the mean, for time and memory where experts are
                     sharded
    `lengths`        (tokens, share) of packed documents, by which attention is priced, each
                     microbatch at its own; shares are of documents (`autopar/lengths.py`)
    `software`       what prices assume to run on the devices: "autopar", or another stack by name
                     (`cost/hardware/software.py`), which says what the plan would take there
    `check_every`    ranks compare batches and learning rates in the first steps, then in every
                     n-th; None: only in the first ones
    `compile`        "regions": fuse operators between collectives by `torch.compile`; bits differ.
                     "regions+graphs": as CUDA graphs, too. "auto": see `module/compiling.py`
    """

    microbatches: int | str = "auto"
    schedule: str = "auto"
    stages: int | str | tuple[StageOption, ...] = "auto"
    mesh_shape: str | Mapping[str, int] = "auto"
    optimizer: str = "adamw"
    precision: str = "model"
    reduce_dtype: torch.dtype | None = None
    master_weights: bool = False
    memory_limit: int | None = None
    memory_margin: float | None = None
    recompute: str = "auto"
    manual: Manual | None = None
    force: tuple[Pin, ...] = ()
    forbid: frozenset[str] = frozenset()
    fallback: Literal["error", "replicate"] = "error"
    solver: Literal["auto", "ilp"] = "auto"
    tolerance: float = 0.01
    tie: float = 0.02
    time_limit_s: float | None = 60.0
    batch_dims: Mapping[str, int | None] = field(default_factory=dict)
    optimizer_gather: tuple[str, ...] = ()
    loss_fn: Callable[[Any, Any], Any] | None = None
    progress: bool | Callable[..., Any] = False
    check_every: int | None = 100
    compile: str = "none"
    imbalance: float = 1.0
    lengths: Lengths = ()
    software: str = "autopar"

    @property
    def n_stages(self) -> int | None:
        """How many stages the user asks for; None for "auto"."""
        if isinstance(self.stages, tuple):
            return len(self.stages)
        return self.stages if isinstance(self.stages, int) else None

    @property
    def compiles(self) -> bool:
        """Do generated programs have regions that are compiled?"""
        return self.compile in ("regions", "regions+graphs")

    @property
    def dtypes(self) -> Precision:
        """The dtypes that the options ask for."""
        if self.precision == "fp64":
            return Precision.of("fp64")
        return Precision(self.precision, self.reduce_dtype, self.master_weights)

    def texts(self) -> dict[str, str]:
        """Name -> value as text that is equal in all processes: of a function, its name."""
        return {f.name: _text(getattr(self, f.name)) for f in fields(self)}

    @property
    def recompute_mode(self) -> Recompute | None:
        """How every repeated block is recomputed; None if the user does not say."""
        words = (self.recompute, self.manual.recompute if self.manual else "none")
        return next((mode for mode in MODES if mode in words), None)

    @property
    def keeps_user_regions(self) -> bool:
        """Do checkpointed regions of the user's code run again, or do the options overrule them?"""
        recipe = self.manual.recompute if self.manual else "none"
        return self.recompute == "auto" and recipe == "none" and "recompute" not in self.forbid

    @property
    def searches_recompute(self) -> bool:
        """May the planner choose what is recomputed? Not with `manual`: a recipe is no search."""
        is_free = self.recompute == "auto" and self.manual is None
        return is_free and "recompute" not in self.forbid

    @staticmethod
    def of(**kwargs: Any) -> Options:
        """The options that a user gave; the others have their defaults.

        Raises `OptionError` for an unknown name, for a value that is not allowed or that
        contradicts another, and `NotSupportedError` for a documented value that is not built.
        """
        valid = tuple(f.name for f in fields(Options))
        for name in kwargs:
            if name not in valid:
                raise OptionError(
                    f"there is no option {name!r}; the options are {', '.join(valid)}",
                    hint=_ELSEWHERE.get(name) or closest(name, valid),
                )
        options = Options(**{name: _CHECKS[name](value) for name, value in kwargs.items()})
        _check_precision(options)
        if options.manual is not None:
            _check_recipe(options, options.manual)
        if options.recompute_mode is not None and "recompute" in options.forbid:
            raise OptionError(
                f"recompute={options.recompute_mode!r} asks for what forbid='recompute' forbids",
                hint="give one of them",
            )
        if options.memory_limit is not None and options.memory_margin is not None:
            raise OptionError(
                "memory_limit says what a plan may use, memory_margin what it leaves free",
                hint="give one of them",
            )
        if (options.n_stages or 1) > 1 and "pipeline" in options.forbid:
            raise OptionError(
                f"stages={kwargs['stages']!r} asks for what forbid='pipeline' forbids",
                hint="give one of them",
            )
        return options


def _text(value: Any) -> str:
    if callable(value) and not isinstance(value, type):
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return f"{getattr(value, '__module__', '')}.{name}"
    if isinstance(value, frozenset):
        return repr(sorted(value))
    if isinstance(value, Mapping):
        return repr(sorted(value.items()))
    return repr(value)


def _check_precision(options: Options) -> None:
    """Raises `OptionError` for options about dtypes that would change nothing."""
    if options.master_weights and options.precision != "model":
        raise OptionError(
            f"master_weights=True with precision={options.precision!r}, which stores parameters in "
            f"{'float64' if options.precision == 'fp64' else 'float32'} already",
            hint="leave it out; it is for half-precision models with precision='model'",
        )
    if options.reduce_dtype is not None and not options.dtypes.casts:
        raise OptionError(
            f"reduce_dtype={options.reduce_dtype} with precision={options.precision!r}, where "
            "gradients are of the parameters' dtype",
            hint="precision='bf16-mixed', or master_weights=True for a half-precision model",
        )


def _check_recipe(options: Options, manual: Manual) -> None:
    """Raises `OptionError` if another option contradicts the recipe."""
    if manual.microbatch_size is not None and options.microbatches != "auto":
        raise OptionError(
            f"Manual.microbatch_size={manual.microbatch_size} and "
            f"microbatches={options.microbatches} both say how the batch is cut",
            hint="give one of them",
        )
    if options.stages not in ("auto", manual.pp):
        raise OptionError(
            f"Manual.pp={manual.pp} and stages={options.stages!r} both cut the model",
            hint="give one of them",
        )
    if manual.recompute != "none" and options.recompute not in ("auto", manual.recompute):
        raise OptionError(
            f"Manual.recompute={manual.recompute!r} and recompute={options.recompute!r} both "
            "say what runs again in backward",
            hint="give one of them",
        )
    asked = {
        "pipeline": ("pp", manual.pp > 1),
        "data": ("dp", manual.dp > 1),
        "tensor": ("tp", manual.tp > 1),
        "sequence": ("cp", True) if manual.cp > 1 else ("sp", manual.sp and manual.tp > 1),
        "expert": ("ep", manual.ep > 1),
        f"zero{manual.zero}": ("zero", manual.zero > 0 and manual.dp * manual.cp > 1),
    }
    for word, (name, active) in asked.items():
        if active and word in options.forbid:
            raise OptionError(
                f"Manual.{name}={getattr(manual, name)} asks for what forbid={word!r} forbids",
                hint="give one of them",
            )


def _microbatches(value: Any) -> int | str:
    if isinstance(value, str):
        return check_word("microbatches", value, ("auto",), ())
    return check_count("microbatches", value)


def _stages(value: Any) -> int | str | tuple[StageOption, ...]:
    if isinstance(value, str):
        return check_word("stages", value, ("auto",), ())
    if isinstance(value, Iterable):
        return _stage_list(tuple(value))
    return check_count("stages", value)


def _tuple(value: Any) -> tuple[Any, ...]:
    """The items of `value`; none if it is not iterable."""
    return tuple(value) if isinstance(value, Iterable) else ()


def _stage_list(value: tuple[Any, ...]) -> tuple[StageOption, ...]:
    """The stages of a list of (module names, submesh shape)."""
    found: list[StageOption] = []
    named: set[str] = set()
    hint = 'stages=[(["wte", "h.0"], (1, 2)), (["h.1", "ln_f", "lm_head"], (1, 2))]'
    for item in value:
        if isinstance(item, StageOption):
            item = (item.modules, item.mesh_shape)
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise OptionError(f"a stage is (module names, submesh shape), not {item!r}", hint=hint)
        names, shape = item
        modules = (names,) if isinstance(names, str) else _tuple(names)
        if not modules or not all(isinstance(m, str) and m for m in modules):
            raise OptionError(f"a stage needs names of modules, not {names!r}", hint=hint)
        sizes = (1, shape) if is_int(shape) else _tuple(shape)
        if len(sizes) != 2 or not all(is_int(n) and n >= 1 for n in sizes):
            raise OptionError(f"{shape!r} is no submesh (nodes, devices per node)", hint=hint)
        twice = named & set(modules)
        if twice:
            raise OptionError(f"stages= names {sorted(twice)[0]!r} twice")
        named |= set(modules)
        found.append(StageOption(modules, sizes))
    if not found:
        raise OptionError("stages=[] holds no stage", hint=hint)
    return tuple(found)


def _memory_limit(value: Any) -> int | None:
    if isinstance(value, str):
        value = parse_bytes(value)
    size_bytes = positive("memory_limit", value, "bytes per device")
    if size_bytes is not None and size_bytes < 1:
        raise OptionError(
            f"memory_limit={value!r} is less than one byte per device",
            hint='write memory_limit="40GiB"; a number is bytes',
        )
    return None if size_bytes is None else int(size_bytes)


def _manual(value: Any) -> Manual | None:
    if value is None or isinstance(value, Manual):
        return value
    raise OptionError(
        f"manual is an autopar.Manual, not {value!r}", hint="manual=autopar.Manual(dp=2, tp=4)"
    )


def _forbid(value: Any) -> frozenset[str]:
    if value is None:
        return frozenset()
    words = (value,) if isinstance(value, str) else value
    if not isinstance(words, Iterable):
        raise OptionError(
            f"forbid is a word or several, not {value!r}", hint=f"one of {', '.join(FORBIDDABLE)}"
        )
    return frozenset(check_word("forbid", word, FORBIDDABLE, (), _ALSO_CALLED) for word in words)


def _batch_dims(value: Any) -> dict[str, int | None]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise OptionError(
            f"batch_dims maps input paths to dims, not {value!r}",
            hint='batch_dims={"input_ids": 0, "temperature": None}',
        )
    for path, dim in value.items():
        if not isinstance(path, str):
            raise OptionError(
                f"batch_dims is keyed by input paths, not {path!r}",
                hint='a positional input is "0", a nested one "mask.0"',
            )
        if dim is not None and (not is_int(dim) or dim < 0):
            raise OptionError(
                f"batch_dims[{path!r}] is a dim, counted from 0, or None, not {dim!r}",
                hint="None says that the input has no batch dim",
            )
    return dict(value)


def _reduce_dtype(value: Any) -> torch.dtype | None:
    allowed = (None, torch.float32, torch.bfloat16, torch.float16)
    if isinstance(value, str):
        value = getattr(torch, value, value)
    if value not in allowed:
        raise OptionError(
            f"reduce_dtype is torch.float32, torch.bfloat16 or torch.float16, not {value!r}"
        )
    return value


def _master_weights(value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"master_weights is True or False, not {value!r}")
    return value


def _names(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else _tuple(value)
    if not all(isinstance(n, str) for n in names) or not isinstance(value, Iterable):
        raise OptionError(
            f"optimizer_gather is names or patterns of parameters, not {value!r}",
            hint='optimizer_gather=["h.*.mlp.c_fc.weight"]',
        )
    return names


def _progress(value: Any) -> Any:
    if not isinstance(value, bool) and not callable(value):
        raise OptionError(f"progress is True, False or a function, not {value!r}")
    return value


def _imbalance(value: Any) -> float:
    factor = positive("imbalance", value, "times the mean of rows")
    if factor is None or factor < 1:
        raise OptionError(
            f"imbalance={value!r}: the fullest expert has at least the mean of rows, 1.0",
            hint="imbalance=1.3: it has 1.3 times the mean",
        )
    return float(factor)


def _memory_margin(value: Any) -> float | None:
    return None if value is None else share("memory_margin", value, "the device's memory")


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "microbatches": _microbatches,
    "schedule": one_of("schedule", " ".join(("auto", *CHUNKS)), "pipedream pipedream-2bw terapipe"),
    "stages": _stages,
    "mesh_shape": check_mesh_shape,
    "optimizer": one_of("optimizer", " ".join(OPTIMIZERS), "adafactor"),
    "precision": one_of("precision", "model bf16-mixed bf16-autocast fp16-mixed fp64"),
    "reduce_dtype": _reduce_dtype,
    "master_weights": _master_weights,
    "memory_limit": _memory_limit,
    "memory_margin": _memory_margin,
    "recompute": one_of("recompute", f"auto none {' '.join(MODES)}"),
    "manual": _manual,
    "force": parse_pins,
    "forbid": _forbid,
    "fallback": one_of("fallback", "error replicate"),
    "solver": one_of("solver", "auto ilp"),
    "tolerance": lambda value: share("tolerance", value),
    "tie": lambda value: share("tie", value),
    "time_limit_s": lambda value: positive("time_limit_s", value, "seconds"),
    "batch_dims": _batch_dims,
    "optimizer_gather": _names,
    "loss_fn": loss_function,
    "progress": _progress,
    "check_every": lambda value: None if value is None else check_count("check_every", value),
    "compile": one_of("compile", "none regions regions+graphs auto"),
    "imbalance": _imbalance,
    "lengths": parse_lengths,
    "software": one_of("software", " ".join(SOFTWARE)),
}
