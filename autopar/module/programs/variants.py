"""The compiled programs of a module, by what was called and by the Python values in their graphs.

A key says the mode, the input signature and whether outputs are wanted. Its variants differ in
Python values that the trace read (`Frozen`). A value that changes makes another variant; going back
to an earlier value finds the earlier one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autopar.capture import Watch, shown
from autopar.errors import AutoparError, CaptureError, PlanError
from autopar.module.job import agree, own_rank
from autopar.module.programs.captures import Captures, Key
from autopar.module.programs.compiled_step import Built
from autopar.program.graph import Program

Changed = dict[str, tuple[object, object]]
MAX_VARIANTS = 8  # of one key; the least recently used one is dropped
_N_SHOWN = 3
_REFUSED = ("class of ", "module `", "tied parameters", "`requires_grad` ", "`shape` of `")


@dataclass
class _Variant:
    """A captured program, what it was compiled to, and what its graph holds."""

    program: Program
    built: Built
    watch: Watch


class Variants:
    """The compiled programs of one module.

    number        the same on every rank
    is_written    have parameters of the model been written to since the module copied them?
    """

    def __init__(
        self, model: nn.Module, loss_fn: Any, number: int, is_written: Callable[[], bool]
    ) -> None:
        self._model, self._loss_fn, self._number = model, loss_fn, number
        self._is_written = is_written
        self.captures: Captures[list[_Variant]] = Captures()
        self._told: set[str] = set()
        self._n_changes = 0

    @property
    def first(self) -> Built:
        """The program that was planned."""
        return next(iter(self.captures))[0].built

    def add(self, key: Key, program: Program, built: Built) -> None:
        """Keep a compiled program as the current one of its key."""
        watch = Watch(self._model, self._loss_fn, program.frozen)
        kept = self.captures.find(key) or []
        kept.append(_Variant(program, built, watch))
        del kept[:-MAX_VARIANTS]
        self.captures.add(key, kept)

    def for_buffers(self, remade: Callable[[Built], Built]) -> Variants:
        """The same variants for a copy of the module; `remade` gives each program its buffers."""
        twin = Variants(self._model, self._loss_fn, self._number, self._is_written)
        twin._told, twin._n_changes = set(self._told), self._n_changes
        made: dict[int, Built] = {}
        for key, kept in self.captures.items():
            for variant in kept:
                if id(variant.built) not in made:
                    made[id(variant.built)] = remade(variant.built)
            twin.captures.add(key, [replace(v, built=made[id(v.built)]) for v in kept])
        return twin

    def current(
        self, key: Key, trace: Callable[[], Program], compiled: Callable[[Program], Built]
    ) -> Built:
        """The program for a key and the Python values of now; captures again if they changed.

        Raises `CaptureError` if ranks changed to different values, or if what changed cannot be
        followed; `PlanError` if the plan does not fit the new graph.
        """
        kept = self.captures.find(key)
        if kept is None:
            self._tell_if_written()
            program = trace()
            built = compiled(program)
            self.add(key, program, built)
            return built
        changed = kept[-1].watch.changed()
        if not changed:
            return kept[-1].built
        _refuse(changed)
        before = kept[-1].built
        found = next((v for v in reversed(kept[:-1]) if not v.watch.changed()), None)
        if found is not None:
            kept.remove(found)
            kept.append(found)
            if found.built is not before:
                self._agree(changed, found.program)
        else:
            self._capture_again(key, kept, changed, trace, compiled)
        return kept[-1].built

    def _capture_again(
        self,
        key: Key,
        kept: list[_Variant],
        changed: Changed,
        trace: Callable[[], Program],
        compiled: Callable[[Program], Built],
    ) -> None:
        """Add a variant; a graph that is known already is not compiled again."""
        self._tell(changed)
        program = trace()
        same = next((v.built for v in reversed(kept) if program.equals(v.program)), None)
        if same is not kept[-1].built:
            self._agree(changed, program)
        if same is None:
            try:
                same = compiled(program)
            except AutoparError as error:
                raise PlanError(
                    f"{_described(changed)}; the plan does not fit the graph that this makes: "
                    f"{str(error).splitlines()[0]}",
                    hint="call autopar.parallelize again after such a change",
                ) from error
        self.add(key, program, same)

    def agree_on_shapes(self, given: Mapping[str, str]) -> None:
        """All ranks meet a batch of new shapes; `given` says which, by path.

        Raises `CaptureError` on a rank that meets it alone: the others run a step without it.
        """
        self._n_changes += 1
        agree(f"{self._number}/{self._n_changes}", repr(given), given, "a new shape of")

    def _agree(self, changed: Changed, program: Program) -> None:
        """Raise `CaptureError` unless all ranks go on with the same graph and constants."""
        self._n_changes += 1
        agree(
            f"{self._number}/{self._n_changes}",
            program.hash() + program.hash_of_constants(),
            {name: _portable(now) for name, (_, now) in changed.items()},
        )

    def _tell_if_written(self) -> None:
        """Another kind of program sees values that go with weights it does not have: say so."""
        planned = next((of_key[0] for of_key in self.captures), None)
        changed = {} if planned is None else planned.watch.changed()
        changed = {n: c for n, c in changed.items() if not n.startswith("`training` ")}
        if changed and self._is_written():
            self._tell(changed)

    def _tell(self, changed: Changed) -> None:
        new = {name: change for name, change in changed.items() if name not in self._told}
        self._told |= new.keys()
        if new and own_rank() == 0:
            text = f"{_described(new)}: captured again; pass it as a tensor input to avoid that"
            if self._is_written():  # adapters are merged so
                text += (
                    ". Parameters of the original model were written to as well, which the "
                    "parallel module does not read: pm.load_state_dict(...) takes them over"
                )
            warnings.warn(text, stacklevel=8)


def _refuse(changed: Changed) -> None:
    """Raise for a change of the original model that the parallel module cannot follow."""
    refused = {n: change for n, change in changed.items() if n.startswith(_REFUSED)}
    if refused:
        raise CaptureError(
            f"the model was changed after autopar.parallelize: {_described(refused)}",
            hint="replace modules, resize and freeze parameters before autopar.parallelize",
        )


def _described(changed: Changed) -> str:
    texts = [
        f"{name} changed from {shown(then)} to {shown(now)}"
        for name, (then, now) in changed.items()
    ]
    more = f" and {len(texts) - _N_SHOWN} more" if len(texts) > _N_SHOWN else ""
    return ", ".join(texts[:_N_SHOWN]) + more


def _portable(value: object) -> str:
    """A value as text that is equal in all processes."""
    code = getattr(value, "co_code", None)
    if code is not None:
        return f"{getattr(value, 'co_qualname', '')} {code.hex()}"
    return repr(value)
