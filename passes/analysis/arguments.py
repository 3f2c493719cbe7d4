"""Arguments of captured calls as a generated program writes them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

_VIEWS_WITH_SIZES = ("aten.reshape.default", "aten.view.default")


def override(
    node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], changed: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with those named in `changed` replaced."""
    assert isinstance(node.target, torch._ops.OpOverload)
    positions = {a.name: i for i, a in enumerate(node.target._schema.arguments)}
    new_args, new_kwargs = list(args), dict(kwargs)
    for name, value in changed.items():
        if positions[name] < len(new_args):
            new_args[positions[name]] = value
        else:
            new_kwargs[name] = value
    return tuple(new_args), new_kwargs


def prologue_lines(graph: torch.fx.Graph) -> tuple[tuple[str, str], ...]:
    """The prologue's calls as (variable, expression); the last one is the result."""
    lines = []
    device = next(f"{node}.device" for node in graph.nodes if node.op == "placeholder")

    def word(value: Any) -> str:
        """New tensors are where the inputs are."""
        return device if isinstance(value, torch.device) else repr(value)

    for node in graph.nodes:
        if node.target is operator.getitem:
            lines.append((node.name, f"{node.args[0]}[{node.args[1]!r}]"))
        elif node.op == "call_function":
            args = _row_free_arguments(node)
            words = [*map(word, args), *(f"{k}={word(v)}" for k, v in node.kwargs.items())]
            lines.append((node.name, f"torch.ops.{node.target}({', '.join(words)})"))
        elif node.op == "output":
            lines.append(("return", ", ".join(map(str, node.args[0])) + ","))
    return tuple(lines)


def _row_free_arguments(node: torch.fx.Node) -> tuple[Any, ...]:
    """A prologue's arguments for any number of rows, because a rank may be given only its own.

    Rows are the leading dim, and views keep them leading: the leading size becomes -1.
    """
    args = tuple(node.args)
    if str(node.target) not in _VIEWS_WITH_SIZES or -1 in args[1] or not args[1]:  # type: ignore[operator]
        return args
    return (args[0], [-1, *args[1][1:]], *args[2:])  # type: ignore[index,misc]
