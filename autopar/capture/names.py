"""Names of operators for people and plans: stable keys, and lines of the user's code.

A key is `module.path/op#occurrence`: the innermost module that ran the operator, the ATen name
without `aten.` and `.default`, and a count of this operator in this module. Keys do not depend on
node names, so plans survive changes elsewhere in the graph. The root module's path is empty.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from autopar.operators import function_of

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_REPEATED_CALL = re.compile(r"@\d+")
# Functional forms have the name of the operator that the model calls, so that keys are equal in
# training and in evaluation.
_CALLED = {"_native_batch_norm_legit_functional": "batch_norm"}
# Names for the results of operators whose results differ in kind.
_RESULTS = {"batch_norm": ("batch_norm", "mean", "rstd", "running_mean", "running_var")}
_LIBRARY = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


def source_line(node: torch.fx.Node) -> str | None:
    """`file:line` of the innermost frame outside torch (else of any frame), None if unknown."""
    trace = node.meta.get("stack_trace")
    frames = [(m["file"], m["line"]) for m in _FRAME.finditer(trace)] if trace else []
    outside = [(f, n) for f, n in frames if not f.startswith((_LIBRARY, _HERE))]
    for file, line in reversed(outside or frames):
        return f"{file}:{line}"
    return None


def module_path(node: torch.fx.Node, prefix: str) -> str:
    """Dotted path of the innermost module, without the `prefix` that the loss wrapper adds."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = _REPEATED_CALL.sub("", str(list(stack.values())[-1][0]))
    return "" if path + "." == prefix else path.removeprefix(prefix)


def op_name(node: torch.fx.Node) -> str:
    """`aten.add.Tensor` -> `add.Tensor`, `aten.mm.default` -> `mm`."""
    if isinstance(node.target, torch._ops.OpOverload):
        function = function_of(str(node.target))
        if function is not None:
            return function.cls.__name__  # without a hash of arguments, such as sizes of the batch
        name = str(node.target).removeprefix("aten.").removesuffix(".default")
        return _CALLED.get(name, name)
    return getattr(node.target, "__name__", str(node.target))


def result_name(node: torch.fx.Node, index: int) -> str:
    """The node name to request for one result of an operator."""
    names = _RESULTS.get(op_name(node))
    return names[index] if names else "getitem"


def operator_keys(nodes: Iterable[torch.fx.Node], prefix: str) -> dict[str, str]:
    """Node name -> key; `nodes` are the operators in execution order."""
    seen: Counter[str] = Counter()
    keys = {}
    for node in nodes:
        stem = f"{module_path(node, prefix)}/{op_name(node)}"
        keys[node.name] = f"{stem}#{seen[stem]}"
        seen[stem] += 1
    return keys
