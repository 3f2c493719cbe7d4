"""Equal models are captured once per process by what plans, verifies and trains them.

A capture is reused if the models, batches and options are equal, and the Python values that it read
are what they were. Values of parameters and of batches do not count. What cannot be pickled, such
as a class inside a function, is captured each time. Tests of capture call `capture` itself, which
caches nothing; `test_capture_models.py` checks that it gives the same program each time. Nobody may
write to a shared program.
"""

from __future__ import annotations

import inspect
import io
import pickle
from collections import OrderedDict
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from autopar.capture import Watch, capture
from autopar.module.programs import programs
from autopar.passes.binding import step_capture
from autopar.program.graph import Program

_OF_BUFFERS = " of the model's buffers"  # how `Frozen` names them
N_KEPT = 64  # programs, the last ones used
_SIGNATURE = inspect.signature(capture)
_kept: OrderedDict[tuple[object, ...], Program] = OrderedDict()


class _Fingerprint(pickle.Pickler):
    """Writes models and batches without the values that no capture reads."""

    def __init__(self, file: io.BytesIO, *, values: bool) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.values = values

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        shown: tuple[object, ...] = (type(obj), tuple(obj.shape), obj.stride(), obj.dtype)
        shown = (*shown, str(obj.device), obj.requires_grad)
        if self.values and not isinstance(obj, nn.Parameter) and not obj.is_meta:
            shown = (*shown, obj.detach().tolist())  # a buffer: some are constants of the graph
        return tuple, (shown,)


def _fingerprint(value: object, *, values: bool) -> bytes:
    file = io.BytesIO()
    _Fingerprint(file, values=values).dump(value)
    return file.getvalue()


def captured(
    model: nn.Module, example_inputs: Any, *, loss_fn: Any = None, **options: Any
) -> Program:
    """`capture`, once; the program is shared."""
    call = _SIGNATURE.bind(model, example_inputs, **options)
    call.apply_defaults()
    del call.arguments["model"], call.arguments["loss_fn"]
    try:
        of_model = _fingerprint(model, values=True)
        of_call = _fingerprint(call.arguments, values=False)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        return capture(model, example_inputs, loss_fn=loss_fn, **options)
    # A class of the same name is another where its module is imported again.
    classes = tuple(type(module) for module in model.modules())
    key = classes, of_model, of_call, loss_fn, torch.get_default_dtype()
    changed = Watch(model, loss_fn, _kept[key].frozen).changed() if key in _kept else {}
    if key not in _kept or not all(name.endswith(_OF_BUFFERS) for name in changed):
        changed, _kept[key] = {}, capture(model, example_inputs, loss_fn=loss_fn, **options)
    _kept.move_to_end(key)
    if len(_kept) > N_KEPT:
        _kept.popitem(last=False)
    program = _kept[key]
    if not changed:
        return program
    # Buffers of this model, which are equal, are watched from now on.
    values = {**program.frozen.values, **{name: now for name, (_, now) in changed.items()}}
    return replace(program, frozen=replace(program.frozen, values=values))


def share_captures() -> None:
    """From now on, autopar captures equal models once in this process; workers call it first."""
    for module in (step_capture, programs):
        mock.patch.object(module, "capture", captured).start()
