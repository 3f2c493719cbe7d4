"""Texts that plan again when they are copied: for a shell, or for the Python that made the plan.

A text has every option that the plan was made with. In Python, `model`, `example_inputs` and `plan`
are the reader's own names, as are `loss_fn`, and `mesh` if its links are given as numbers.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from autopar.manual import Manual
from autopar.mesh import Mesh
from autopar.options import PRICED, Options, StageOption
from autopar.passes.facts import Target
from autopar.passes.search import PlanningResult
from autopar.placement import Pin
from autopar.planning.bound import Bound
from autopar.plans import PlanData

_SILENT = ("progress", "optimizer_gather", "check_every")
_DEFAULTS = Options()


@dataclass(frozen=True)
class ShellModel:
    """How a command line names a model: MODEL, and --batch, --seq and --loss if given."""

    model: str
    batch: int | None = None
    seq: int | None = None
    loss: str | None = None


@dataclass(frozen=True)
class Commands:
    """Texts about a plan on `mesh`; with `shell` they are commands, else Python."""

    mesh: Mesh
    options: Options
    shell: ShellModel | None = None

    @staticmethod
    def of(bound: Bound, shell: ShellModel | None = None) -> Commands:
        """Of a plan; `shell` is how a command line named its model."""
        made = bound.compilation
        given = made[Target].options if PlanningResult in made else None
        options = _options_of(bound.data, given, bound.hardware.memory_limit_bytes)
        return Commands(bound.mesh, options, shell)

    def plan(self, mesh: Mesh | None = None, batch: int = 1, **changed: Any) -> str:
        """Plan again, with some options changed, on another mesh, with `batch` times the rows."""
        options, mesh = replace(self.options, **changed), mesh or self.mesh
        given = {
            f.name: getattr(options, f.name)
            for f in fields(Options)
            if f.name not in _SILENT and getattr(options, f.name) != getattr(_DEFAULTS, f.name)
        }
        if self.shell is None:
            words = [_machine(mesh), "example_inputs", *map(_keyword, given.items())]
            rows = f"  # example_inputs: {batch} times the rows" if batch > 1 else ""
            return f"print(autopar.plan(model, {', '.join(words)})){rows}"
        return self._shell_text("plan", mesh, batch, given)

    def what_if(self, change: str) -> str:
        """The same plan on a changed machine."""
        if self.shell is None:
            return f'print(plan.what_if("{change}").predicted)'
        return f"{self.plan().replace('autopar plan', 'autopar simulate', 1)} --what-if {change}"

    def _shell_text(self, what: str, mesh: Mesh, batch: int, given: Mapping[str, Any]) -> str:
        shell = self.shell
        assert shell is not None
        rows = shell.batch * batch if shell.batch is not None else None
        hardware = mesh.hardware if isinstance(mesh.hardware, str) else None
        flags = {
            "batch": rows, "seq": shell.seq, "loss": shell.loss,
            "mesh": "x".join(map(str, mesh.shape)), "hardware": hardware,
        }  # fmt: skip
        words = ["autopar", what, shell.model]
        for name, value in {**flags, **given}.items():
            if value is not None and name not in ("loss_fn", "batch_dims"):
                words += _flags(f"--{name.replace('_', '-')}", value)
        return shlex.join(words)


def _options_of(data: PlanData, given: Options | None, default_limit_bytes: float) -> Options:
    """The options that a plan was made with: as `given`, or those that a loaded plan records."""
    if given is not None:
        return given
    n_stages, limit_bytes = len(data.stages), data.limit_bytes
    is_limited = limit_bytes is not None and limit_bytes != default_limit_bytes
    reduce_dtype = getattr(torch, data.reduce_dtype) if data.reduce_dtype else None
    return replace(
        _DEFAULTS, precision=data.precision, optimizer=data.optimizer, reduce_dtype=reduce_dtype,
        master_weights=data.master_weights, forbid=frozenset(data.forbid),
        microbatches=data.microbatches, stages=n_stages if n_stages > 1 else "auto",
        schedule="auto" if data.schedule == "1f1b" else data.schedule,
        memory_limit=int(limit_bytes or 0) if is_limited else None,
        **{name: getattr(data, name) for name in PRICED},
    )  # fmt: skip


def round_limit(size_bytes: float) -> int:
    """A memory limit near `size_bytes`: whole GiB, or MiB below 8 of those, as people write it."""
    unit = 2**30 if size_bytes >= 8 * 2**30 else 2**20
    return max(round(size_bytes / unit), 1) * unit


def _machine(mesh: Mesh) -> str:
    if mesh.links is not None:
        return f"autopar.Mesh({mesh.shape}, links=mesh.links, device=mesh.device)"
    name = f", hardware={mesh.hardware!r}" if isinstance(mesh.hardware, str) else ""
    return f"autopar.Mesh({mesh.shape}{name})"


def _size(size_bytes: int, python: bool) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if size_bytes % factor == 0:
            n = size_bytes // factor
            return f"{n} * 2**{factor.bit_length() - 1}" if python else f"{n}{unit}"
    return str(size_bytes) if python else f"{size_bytes}B"


def _keyword(option: tuple[str, Any]) -> str:
    name, value = option
    match value:
        case Manual():
            text = f"autopar.Manual({', '.join(_manual(value, repr))})"
        case frozenset():
            text = repr(sorted(value))
        case (StageOption(), *_):
            text = repr([(list(s.modules), s.mesh_shape) for s in value])
        case (Pin(), *_):
            text = repr(_pins(value))
        case _ if name == "memory_limit":
            text = _size(value, python=True)
        case _ if callable(value):
            text = name
        case _:
            text = repr(dict(value) if isinstance(value, Mapping) else value)
    return f"{name}={text}"


def _flags(flag: str, value: Any) -> Iterator[str]:
    """A flag as `cli/options.py` reads it, repeated where it is."""
    match value:
        case True:
            yield flag
            return
        case (Pin(), *_):
            for name, pins in _pins(value).items():
                for pin in pins:
                    yield from (flag, f"{name}={pin}")
            return
        case Manual():
            text = ",".join(_manual(value, str))
        case (StageOption(), *_):
            text = ";".join(
                f"{','.join(s.modules)}@{'x'.join(map(str, s.mesh_shape))}" for s in value
            )
        case frozenset():
            text = ",".join(sorted(value))
        case Mapping():
            text = ",".join(f"{name}={n}" for name, n in value.items())
        case _ if flag == "--lengths":
            text = ",".join(f"{tokens}:{share:.6g}" for tokens, share in value)
        case _ if flag == "--memory-limit":
            text = _size(value, python=False)
        case _:
            text = str(value).removeprefix("torch.")
    yield from (flag, text)


def _manual(manual: Manual, write: Callable[[Any], str]) -> Iterator[str]:
    """`dp=2`, `sp=True`, ..., without what has its default."""
    for f in fields(Manual):
        value = getattr(manual, f.name)
        if value != f.default:
            yield f"{f.name}={write(value)}"


def _pins(pins: tuple[Pin, ...]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for pin in pins:
        found.setdefault(pin.parameter, []).append(str(pin))
    return found
