"""The plan for the ranks that there are now: one made ahead, one kept by this run, or a new one.

    plans=DIR          files made ahead, of any name: the one whose mesh is this job's
    folder/plans       what the run planned itself, `1x2-<digest>.json`

The digest is of what decides a plan: mesh, options, parameters, shapes of the batch. So a restart
runs the same plan, and a script that was changed makes another one.
"""

from __future__ import annotations

import warnings
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from autopar.errors import OptionError, PlanError
from autopar.mesh import Mesh
from autopar.options import BESIDE_A_PLAN, PRICED, Options
from autopar.planning import Plan
from autopar.program.graph import flatten_inputs
from autopar.runtime.state import gathered, own_rank, together
from autopar.runtime.storage import disk_faults


def kept_name(mesh: Mesh, options: Options, model: nn.Module, batch: Any) -> str:
    """`1x2-0123456789ab.json`: equal for equal questions to the planner."""
    decided = {n: t for n, t in options.texts().items() if n not in BESIDE_A_PLAN - PRICED}
    parameters = {n: (tuple(p.shape), p.dtype) for n, p in model.named_parameters()}
    inputs = {
        path: (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
        for path, leaf in flatten_inputs(batch).items()
    }
    asked = repr((mesh, decided, parameters, inputs))
    digest = sha256(asked.encode()).hexdigest()[:12]
    return f"{'x'.join(map(str, mesh.shape))}-{digest}.json"


def find_plan(kept: Path, made_ahead: Path | None, mesh: Mesh) -> tuple[Plan, Path] | None:
    """Rank 0's plan and its file, on every rank; None if there is none. A collective.

    Raises `OptionError` if `made_ahead` is no folder or has two plans for the mesh, `PlanError` for
    a file that is no plan.
    """
    found: tuple[Plan, Path] | None = None
    with together():
        if own_rank() == 0:
            if made_ahead is not None:
                found = _of_mesh(made_ahead, mesh)
                if found is None:
                    warnings.warn(
                        f"{made_ahead} has no plan for a mesh {mesh.shape}: the run plans itself",
                        stacklevel=4,
                    )
            if found is None and kept.exists():
                found = Plan.load(kept), kept
    return gathered(found)[0]


def keep_plan(plan: Plan, path: Path) -> None:
    """Write rank 0's plan. A collective."""
    with together(), disk_faults("writing", path):
        if own_rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f".{path.name}.draft")
            plan.save(draft)
            draft.replace(path)


def _of_mesh(folder: Path, mesh: Mesh) -> tuple[Plan, Path] | None:
    if not folder.is_dir():
        raise OptionError(
            f"plans={str(folder)!r} is no folder",
            hint="make plans ahead: autopar plan MODEL --mesh 1x8 -o DIR/1x8.json",
        )
    loaded = [(Plan.load(path), path) for path in sorted(folder.glob("*.json"))]
    fitting = [(plan, path) for plan, path in loaded if plan.data.mesh.shape == mesh.shape]
    if len(fitting) > 1:
        raise OptionError(
            f"{' and '.join(str(path) for _, path in fitting)} are both for a mesh {mesh.shape}",
            hint="leave one of them in the folder",
        )
    return fitting[0] if fitting else None


def of_file(error: PlanError, path: Path) -> PlanError:
    """The error of a plan that does not fit, with its file."""
    return PlanError(
        f"{path} does not fit this model: {error}", hint="remove the file to plan anew"
    )
