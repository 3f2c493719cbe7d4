"""How each rank calls `autopar.parallelize`: versions, mesh, options, weights, and what it brings.

Rank 0 plans, so options of another rank would have no effect; other weights or another form of the
call would leave it waiting.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata

import torch

from autopar.errors import DivergenceError
from autopar.mesh import Mesh
from autopar.module.agreement.meeting import compared, has_others
from autopar.options import Options
from autopar.units import format_ranks

# Of these a rank may have its own: only rank 0 shows its progress, or only there it takes time.
_OWN = frozenset({"progress", "time_limit_s"})


def compare_settings(
    mesh: Mesh, options: Options, weights: str, brings: str, device: torch.device
) -> None:
    """Raise `DivergenceError` on every rank if one calls `autopar.parallelize` in another way.

    brings   what there is to plan from: a batch, a plan, or nothing yet
    """
    if not has_others():
        return
    mine = {
        "autopar": _installed(),
        "torch": str(torch.__version__),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "mesh": repr((mesh.shape, mesh.axis_names)),
        "weights": weights if weights in ("rank0", "init") else "a path",
        "called with": brings,
    }
    mine |= {name: text for name, text in options.texts().items() if name not in _OWN}
    every = compared("settings", mine, device)
    if every is not None:
        raise DivergenceError(
            "autopar.parallelize is called with other settings on other ranks:\n  "
            + "\n  ".join(different(every)),
            hint="run one script, with the same arguments and the same environment, on every rank",
        )


def different(of_ranks: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Lines: what differs from what the first of these ranks has, on which ranks, and both values.

    of_ranks   rank -> name -> value
    """
    first = min(of_ranks)
    lines = []
    for name in dict.fromkeys(name for values in of_ranks.values() for name in values):
        own = of_ranks[first].get(name, "absent")
        others: dict[str, list[int]] = {}
        for rank, values in of_ranks.items():
            if (value := values.get(name, "absent")) != own:
                others.setdefault(value, []).append(rank)
        lines += [
            f"{name}: {value} on {format_ranks(ranks)}, {own} on {format_ranks([first])}"
            for value, ranks in others.items()
        ]
    return lines


def _installed() -> str:
    try:
        return metadata.version("autopar")
    except metadata.PackageNotFoundError:  # run from its sources
        return "not installed"
