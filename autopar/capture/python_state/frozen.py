"""Python values that the graph holds as constants: recorded at capture, compared before each step.

A trace reads attributes of modules, closures and globals once. What it read becomes part of the
graph, so a value that changes later would have no effect. `freeze` records what was read
(`reads.py`, `observe.py`), and `Watch` says what has changed since. What a trace itself changes
(a counter, a list that grows, Python's random numbers) cannot be right: `checked_trace` refuses it.
"""

from __future__ import annotations

import operator
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import starmap
from typing import Any, TypeVar

import numpy as np
import torch
from torch import fx, nn
from torch.export import ExportedProgram

from autopar.capture.findings import Findings
from autopar.capture.python_state.code import is_library_module
from autopar.capture.python_state.history import check_history
from autopar.capture.python_state.hooks import where_defined
from autopar.capture.python_state.observe import Observation, observe, of_module
from autopar.capture.python_state.reads import Recorder, recorded
from autopar.capture.python_state.snapshot import Held, Scalar, same
from autopar.errors import CaptureError
from autopar.program.graph import AttributeReads, Frozen

T = TypeVar("T")
L = TypeVar("L")

CACHE_HINT = "if its first call fills a cache, call the model once before autopar.parallelize"
_STATE_HINT = (
    "the trace runs forward once, so every step would see the same value; keep it in a registered "
    "buffer, count outside of forward, or take values from pm.step(..., outputs=); " + CACHE_HINT
)
_MAX_SHOWN = 60


def checked_trace(
    model: nn.Module,
    twin: nn.Module,
    loss_fn: Any,
    export: Callable[[Observation], tuple[tuple[ExportedProgram, L], list[object]]],
    forward: Callable[[Observation], tuple[None, list[object]]],
) -> tuple[tuple[ExportedProgram, L], AttributeReads]:
    """Run `export`, which traces `twin`, and leave the user's Python state as it was.

    Returns the trace and what it read. A trace may set state once (a setting that is found by the
    first call): then a second run from that state must change nothing and be equal. `forward` alone
    takes a fifth of the time; where it calls something else of torch, a second trace decides. Both
    get what was observed before them, and also return what they called.

    Raises `CaptureError` if the trace changes Python state that it reads in any other way, or reads
    tensors that have a history of autograd.
    """
    before = Observation.around_trace(model, loss_fn)
    python, numpy_, torch_ = random.getstate(), np.random.get_state(), torch.get_rng_state()
    recorders: list[Recorder] = []

    def run(trace: Callable[[Observation], T], state: Observation) -> tuple[T, CaptureError | None]:
        with recorded(twin, model) as recorder:
            recorders.append(recorder)
            try:
                made = trace(state)
            finally:  # a trace that fails may fail for that
                check_history(model, (*recorder.reads,))
        return made, _refusal(model, recorder, state, Observation.around_trace(model, loss_fn))

    def is_settled(calls: list[object]) -> bool:
        """Does forward call the same once more, and change nothing?"""
        try:
            (_, again), still = run(forward, Observation.around_trace(model, loss_fn))
        except CaptureError:  # without a trace forward may do what a trace does not
            return False
        return still is None and again == calls

    try:
        (exported, calls), refusal = run(export, before)
        if random.getstate() != python:
            raise _random_refusal(before, "random")
        if not _same_state(np.random.get_state(), numpy_):
            raise _random_refusal(before, "numpy.random")
        if refusal is not None:
            recorders[0].keep()
            if not is_settled(calls):
                try:
                    (again, _), still = run(export, Observation.around_trace(model, loss_fn))
                except CaptureError as error:
                    raise refusal from error
                if still is not None or _text(again[0]) != _text(exported[0]):
                    raise refusal
        return exported, (*recorders[0].reads,)
    finally:
        for recorder in reversed(recorders):
            recorder.restore()
        before.restore()
        random.setstate(python)
        np.random.set_state(numpy_)
        torch.set_rng_state(torch_)


def _text(exported: ExportedProgram) -> str:
    """The operators of a trace and of its regions."""
    graphs = [m.graph for m in exported.graph_module.modules() if isinstance(m, fx.GraphModule)]
    return "\n".join(str(graph) for graph in graphs)


def _refusal(
    model: nn.Module, recorder: Recorder, before: Observation, after: Observation
) -> CaptureError | None:
    """What a trace reads and leaves changed; None if there is nothing."""
    for path, name in recorder.changed():
        return CaptureError(
            f"forward reads and changes `{name}` {of_module(path)}, a Python value",
            where=where_defined(type(model.get_submodule(path)).forward),
            hint=_STATE_HINT,
        )
    for name, value in before.values.items():
        now = after.values.get(name)
        if not same(now, value):
            return CaptureError(
                f"forward, a hook or the loss reads and changes {name}: from {shown(value)} to "
                f"{shown(now)} in one trace",
                where=before.place_of(name),
                hint=_STATE_HINT,
            )
    return None


def _random_refusal(before: Observation, module: str) -> CaptureError:
    return CaptureError(
        f"the model draws from Python's `{module}`: what it decides would be the same in each step",
        where=before.places.get(module.partition(".")[0]) or before.places.get("np"),
        hint="draw tensors (torch.rand, nn.Dropout) and use torch.where, or pass the draw as an "
        "input",
    )


def _same_state(one: Any, other: Any) -> bool:
    return all(
        np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
        for a, b in zip(one, other, strict=True)
    )


def freeze(
    model: nn.Module,
    loss_fn: Any,
    reads: AttributeReads,
    modes: Mapping[str, bool],
    buffers: tuple[str, ...],
    findings: Findings,
) -> Frozen:
    """What the graph holds of the user's Python state; each value is a note of the audit."""
    taken = observe(model, loss_fn, reads, modes, buffers=buffers)
    _note(taken, model, reads, findings)
    return Frozen(reads, buffers, taken.values, modes)


def _note(
    taken: Observation,
    model: nn.Module,
    reads: AttributeReads,
    findings: Findings,
) -> None:
    """A note for each value; equal settings of several library modules are one.

    Routine are settings of library modules, and what is inside of a module's attribute (a config).
    """
    kinds = {of_module(path): type(model.get_submodule(path)) for path, _ in reads}
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for text, value in taken.values.items():
        if not isinstance(value, (*Scalar, Held)) or not text.startswith("`"):
            continue
        name, _, place = text[1:].partition("` ")
        kind = kinds.get(place)
        if name in ("requires_grad", "shape"):
            continue
        if kind is not None and (name == "training" or is_library_module(kind.__module__)):
            groups[name, kind.__name__, shown(value)].append(text)
        else:
            inside = kind is not None and any(mark in name for mark in ".[")
            routine = inside or place.startswith("in the partial of ")
            findings.add("frozen", text, shown(value), routine=routine)
    for (name, kind_name, value_text), texts in groups.items():
        what = texts[0] if len(texts) == 1 else f"`{name}` of {len(texts)} {kind_name}"
        findings.add("frozen", what, value_text, routine=True)


def _module(module: nn.Module) -> str:
    return f"{type(module).__name__}({module.extra_repr()})"


def shown(value: object) -> str:
    """A recorded value in a message."""
    text = "a function" if hasattr(value, "co_code") else repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


class Watch:
    """Says which values of a program's `Frozen` have changed on the user's own objects."""

    def __init__(self, model: nn.Module, loss_fn: Any, frozen: Frozen) -> None:
        self._model, self._loss_fn, self._frozen = model, loss_fn, frozen
        self._modules = dict(model.named_modules())
        self._taken = self._observe()
        self._bind()

    def changed(self) -> dict[str, tuple[object, object]]:
        """Name -> (value in the graph, value now) of all that differ; empty if nothing does."""
        if not self._differs and self._is_same():
            return {}
        self._taken = self._observe()
        self._bind()
        return self._differs

    def _observe(self) -> Observation:
        frozen = self._frozen
        return observe(
            self._model, self._loss_fn, frozen.reads, frozen.modes, buffers=frozen.buffers
        )

    def _bind(self) -> None:
        """Flat lists of where each value is, and of what is there now."""
        taken = self._taken
        self._places = [(holder, key) for holder, key, _ in taken.items]
        self._items = [value for *_, value in taken.items]
        self._attributes = [(holder, name) for holder, name, _ in taken.attributes]
        self._held = [value for *_, value in taken.attributes]
        measures: dict[Callable[[Any], object], tuple[list[Any], list[object]]] = {}
        for function, of, result in taken.measures:
            objects, results = measures.setdefault(function, ([], []))
            objects.append(of)
            results.append(result)
        self._measures = [(f, objects, results) for f, (objects, results) in measures.items()]
        then, now = self._frozen.values, taken.values
        self._differs = {
            name: (then.get(name, "absent"), now.get(name, "absent"))
            for name in {**then, **now}
            if name not in then or name not in now or not same(then[name], now[name])
        } | self._replaced()

    def _replaced(self) -> dict[str, tuple[object, object]]:
        """The modules that are others than at first, though what is read of them is equal."""
        return {
            f"module `{path}`": (_module(self._modules[path]), _module(module))
            for path, module in self._model.named_modules()
            if self._modules.get(path, module) is not module
        }

    def _is_same(self) -> bool:
        """Is all that was read still there? This runs before each step, so it is flat."""
        try:
            items = [holder[key] for holder, key in self._places]
            held = list(starmap(getattr, self._attributes))
        except (KeyError, IndexError, AttributeError, ValueError):
            return False
        if not _still(items, self._items) or not _still(held, self._held):
            return False
        if any(key in holder for holder, key in self._taken.missing):
            return False
        return all(list(map(f, objects)) == results for f, objects, results in self._measures)


def _still(now: list[Any], then: list[Any]) -> bool:
    """Are these the same objects, or equal scalars? Equal ones are taken over."""
    if all(map(operator.is_, now, then)):
        return True
    for index, (one, other) in enumerate(zip(now, then, strict=True)):
        if one is other:
            continue
        if not isinstance(one, Scalar) or not same(one, other):
            return False
        then[index] = one
    return True
