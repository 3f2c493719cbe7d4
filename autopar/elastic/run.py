"""The loop "load the last good checkpoint, train, save", around a script's own training loop.

    run = autopar.resilient("run", model, example_batch, save_every=100)
    optimizer = torch.optim.AdamW(run.pm.parameters(), lr=1e-3)
    loader = run.pm.dataloader(dataset, batch_size=32, shuffle=True, seed=0)
    for batch in run.batches(loader, optimizer, n_steps=10_000):
        loss = run.pm.step(**batch)
        optimizer.step()
        optimizer.zero_grad()

`resilient` makes the module for the ranks that there are. `batches` loads when it is called, and
hands on the batches that are left. The body of the loop trains one batch; when the loop asks for
the next one, that batch is done, is counted, and a checkpoint is due or not. So what was done since
the last checkpoint is done again after a failure, with the same batches and random numbers.

A checkpoint holds the module, the optimizer, the loader's place, `states`, the generators, and how
far the run is (`progress.py`). Which batches come depends on the loader alone, never on ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from autopar import api
from autopar.elastic.kept_plans import find_plan, keep_plan, kept_name, of_file
from autopar.elastic.progress import Progress
from autopar.elastic.watched import Watched
from autopar.errors import OptionError, PlanError
from autopar.mesh import Mesh
from autopar.module import ParallelModule
from autopar.options import BESIDE_A_PLAN, Options
from autopar.passes.binding import ExampleInputs
from autopar.planning import MeshLike, PlanOptions
from autopar.runtime.checkpoints import AsyncSaver, Optimizers
from autopar.runtime.launch import init_from_environment
from autopar.runtime.state import gathered, together, world_size
from autopar.runtime.storage import holds_checkpoint

LOADER = "loader"  # the loader's name among the states of a checkpoint
_DTYPES = frozenset({"precision", "reduce_dtype", "master_weights"})


def resilient(
    folder: str | os.PathLike[str],
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    save_every: int,
    keep_last: int = 2,
    keep_every: int | None = None,
    mesh: Callable[[int], MeshLike] | None = None,
    plans: str | os.PathLike[str] | None = None,
    weights: str = "rank0",
    compare_every: int | None = 100,
    **options: Unpack[PlanOptions],
) -> ResilientRun:
    """Shard `model` over the ranks that there are, for a loop that goes on after a restart.

    folder       the run's own, seen by every rank: checkpoints, and the plans that it made
    save_every   batches between checkpoints; with accumulation, a multiple of those that share an
                 optimizer step. The last batch is saved as well
    keep_last, keep_every   as of `AsyncSaver`
    mesh         number of ranks -> mesh; by default (nodes, processes per node) of torchrun
    plans        a folder of plans made ahead (`autopar plan MODEL --mesh 1x8 -o DIR/1x8.json`). The
                 one for this mesh is used; if there is none, or no folder is given, the run plans,
                 and keeps the plan for its restarts
    weights      of a run that begins, as of `parallelize`; `options` are those of `parallelize`
    compare_every   batches between comparisons of how long ranks compute; a warning of rank 0 names
                 a slow one. None: never

    Every rank must call it. Raises what `parallelize` raises, and `PlanError` for a plan of another
    model, with its file.
    """
    for what, value in (("save_every", save_every), ("compare_every", compare_every)):
        never = value is None and what == "compare_every"
        if not never and (type(value) is not int or value < 1):
            raise OptionError(f"{what} is a count of batches, 1 or more, not {value!r}")
    saver = AsyncSaver(folder, keep_last, keep_every)
    machine = Mesh.of(mesh(_n_ranks()) if mesh else _mesh_of_job())
    name = kept_name(machine, Options.of(**options), model, example_inputs)
    kept = Path(folder).absolute() / "plans" / name
    found = find_plan(kept, None if plans is None else Path(plans), machine)
    if found is None:
        pm = api.parallelize(model, machine, example_inputs, weights=weights, **options)
        keep_plan(pm.plan, kept)
        return ResilientRun(pm, Path(folder), saver, save_every, compare_every)
    plan, path = found
    beside: dict[str, Any] = {k: v for k, v in options.items() if k in BESIDE_A_PLAN | _DTYPES}
    try:
        pm = api.parallelize(model, machine, example_inputs, plan=plan, weights=weights, **beside)
    except PlanError as error:
        raise of_file(error, path) from error
    return ResilientRun(pm, Path(folder), saver, save_every, compare_every)


class ResilientRun:
    """A run that loads its last good checkpoint, and saves. Make it with `autopar.resilient`.

    pm          the parallel module
    n_steps     batches trained, `n_samples` their rows, `epoch` the epochs complete: of the whole
                run, so also before a restart
    resumed     the step of the checkpoint that was loaded; None if there was none
    """

    def __init__(
        self, pm: ParallelModule, folder: Path, saver: AsyncSaver, save_every: int,
        compare_every: int | None,
    ) -> None:  # fmt: skip
        self.pm, self.folder, self.save_every = pm, folder, save_every
        self.resumed: int | None = None
        self._saver, self._progress = saver, Progress()
        self._watched = Watched(compare_every, min(pm.checkpointed().place.stages))
        self._saved: int | None = None

    @property
    def n_steps(self) -> int:
        """Batches trained, of the whole run."""
        return self._progress.n_steps

    @property
    def n_samples(self) -> int:
        """Rows of the global batches that were trained."""
        return self._progress.n_samples

    @property
    def epoch(self) -> int:
        """Epochs complete."""
        return self._progress.epoch

    def batches(
        self,
        loader: Iterable[Any],
        optimizer: Optimizers = None,
        *,
        n_steps: int | None = None,
        epochs: int | None = None,
        states: Mapping[str, Any] | None = None,
    ) -> Iterator[Any]:
        """Load the newest whole checkpoint, if there is one; then the batches that are left.

        loader     global batches, the same on every rank and for any number of ranks, with
                   `state_dict` and `load_state_dict`: `run.pm.dataloader(...)`, or your own
        n_steps    batches of the whole run, over any number of epochs; or `epochs`
        states     what else belongs to the run (a schedule), as of `autopar.save`

        A batch is done when the next one is asked for. A loop that ends saves its last batch, and
        waits for that; one that is left by `break` or an error does not.

        Every rank must call it. Raises `StateError` if no checkpoint of the folder is whole, or
        the newest does not fit, and `OptionError` for a loader without a state.
        """
        if (n_steps is None) == (epochs is None):
            raise OptionError(
                f"n_steps={n_steps} and epochs={epochs}", hint="give one: how long the run is"
            )
        if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
            raise OptionError(
                f"a loader of {type(loader).__name__} has no state_dict(): a restart would begin "
                "its batches anew",
                hint="run.pm.dataloader(dataset, batch_size, ...), or a loader with a state, as "
                "torchdata's StatefulDataLoader",
            )
        given = dict(states or {})
        if LOADER in given:
            raise OptionError(f"states={{{LOADER!r}: ...}}: the loader is saved by this name")
        given[LOADER] = loader
        self._resume(optimizer, given)
        return self._left(loader, optimizer, given, n_steps, epochs)

    def _resume(self, optimizer: Optimizers, states: Mapping[str, Any]) -> None:
        """Load, unless the run begins: what rank 0 sees counts."""
        if not gathered(holds_checkpoint(self.folder.absolute()))[0]:
            return
        step, extra = api.load(self.pm, optimizer, self.folder, states)
        with together():
            self._progress.resume(step, extra, str(self.folder))
        self.resumed = self._saved = step

    def _left(
        self, loader: Iterable[Any], optimizer: Optimizers, states: Mapping[str, Any],
        n_steps: int | None, epochs: int | None,
    ) -> Iterator[Any]:  # fmt: skip
        progress, n_empty = self._progress, 0
        while not progress.is_over(n_steps, epochs):
            n_before = progress.n_steps
            for batch in loader:
                self._watched.before(progress.n_steps)
                yield batch
                progress.count(batch)
                self._watched.after(progress.n_steps)
                if progress.n_steps % self.save_every == 0:
                    self._save(optimizer, states)
                if n_steps is not None and progress.n_steps == n_steps:
                    break
            else:
                progress.epoch += 1
                # A checkpoint of the last batch of an epoch leaves none of it.
                n_empty = n_empty + 1 if progress.n_steps == n_before else 0
                if n_empty > 1:
                    raise OptionError("the loader has no batches", hint="it must begin again")
        if self._saved != progress.n_steps:
            self._save(optimizer, states)
        self._saver.wait()

    def _save(self, optimizer: Optimizers, states: Mapping[str, Any]) -> None:
        step, extra = self.n_steps, self._progress.record(self.pm)
        self._saver.save(self.pm, optimizer, step=step, extra=extra, states=states)
        self._saved = step


def _n_ranks() -> int:
    """The processes of the job, which this one joins if it was started for one."""
    if "RANK" in os.environ:
        init_from_environment()
    return world_size()


def _mesh_of_job() -> tuple[int, int]:
    """(nodes, processes per node), as torchrun or `autopar.launch` started them."""
    n_ranks = _n_ranks()
    n_local = int(os.environ.get("LOCAL_WORLD_SIZE", n_ranks))
    if n_ranks % n_local:
        return 1, n_ranks  # nodes of different sizes
    return n_ranks // n_local, n_local
