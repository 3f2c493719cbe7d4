"""Refuses tables that know the model's modules by identity.

A trace runs on a copy of the model. A table that the model's code reads, `SCALES[id(self)]` or
`SCALES.get(self)`, has the user's modules as keys: the copy would not be found there, and what
forward makes of that would be captured in silence. A table that an attribute of the model holds is
copied with it, and so are its keys; but not if they are `id`s.
"""

from __future__ import annotations

from torch import nn

from autopar.capture.python_state import Snapshot
from autopar.errors import NotSupportedError


def check_identities(model: nn.Module, state: Snapshot) -> None:
    """Raise `NotSupportedError` if a dict or set that was read knows modules of `model`."""
    paths = {id(module): path for path, module in model.named_modules()}
    for container, _ in state.contents:
        for key in container if isinstance(container, (dict, set)) else ():
            is_number = isinstance(key, int) and key in paths
            if is_number or (isinstance(key, nn.Module) and id(key) in paths):
                path = paths[key if is_number else id(key)]
                what = f"`{path}`" if path else f"the model, {type(model).__name__},"
                raise NotSupportedError(
                    f"forward reads a {type(container).__name__} that knows {what} by "
                    + ("its id()" if is_number else "identity")
                    + ": the copy of the model that is traced would not be found in it",
                    hint="keep the value as an attribute of the module, or key it by a name or "
                    "number that the module has",
                )
