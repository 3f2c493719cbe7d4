"""How batches reach a parallel module: the inputs a rank reads, its loaders, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from autopar.errors import BatchError
from autopar.module.agreement import Given
from autopar.module.batches import Loaded, Loader, Pad, Reader
from autopar.module.calls import check_inputs
from autopar.module.held_state import HeldState
from autopar.module.padding import PaddingCheck
from autopar.planning import Plan
from autopar.program.graph import Program, flatten_inputs


class Feeding(HeldState):
    """Base of `ParallelModule`."""

    def dataloader(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pad: Pad | None = None,
        rows: str = "auto",
        seed: int | None = None,
        pin_memory: bool | None = None,
        **options: Any,
    ) -> Loader:
        """A loader of this module: `for batch in loader: pm.step(**batch)`. Make it on every rank.

        batch_size   rows of the global batch
        shuffle      in an order of `seed` and epoch; `seed` is rank 0's `torch.initial_seed()`
        collate_fn   as of torch's `DataLoader`; it gets the rows of the whole batch
        pad          makes a last, shorter batch as long as the others in training: a value for
                     every input of a row, `{"input_ids": 0, "labels": -100}`, or `fn(row)`, which
                     makes a row of padding of another row. Before the first such epoch, two steps
                     check that padding does not count. `outputs=` shows rows of padding, too
        rows         "local": in training a rank loads only rows that it reads; a `collate_fn` must
                     not make a row depend on others. "global": whole batches. "auto": the first,
                     where the plan splits rows, rows are dictionaries and there is no `collate_fn`
        pin_memory   by default on GPUs, where the next batch is also copied ahead
        options      others of torch's `DataLoader`: `num_workers`, `prefetch_factor`, ...

        In evaluation mode batches are whole and not padded. Dictionaries of one rank's rows have an
        item `batch`, which tells `pm.step`.

        Raises `NotSupportedError` for datasets without an index, `OptionError` for options that
        would order rows by rank.
        """
        reader = Reader(
            self._plan_or_none, lambda: self._state.local_rows, lambda: self.training,
            self._check_padding, self._device,
        )  # fmt: skip
        return Loader(
            reader, dataset, batch_size, shuffle=shuffle, drop_last=drop_last,
            collate_fn=collate_fn, pad=pad, rows=rows, seed=seed, pin_memory=pin_memory,
            options=options,
        )  # fmt: skip

    def _follow(self, mark: Loaded, given: Given) -> None:
        """Check what a loader says of a batch.

        Raises `BatchError` for rows that this rank does not read, or padding that counts.
        """
        if mark.rows is not None:
            self._check_rows(mark.n_rows, mark.rows)
        elif mark.n_padded and not mark.record.is_exact:  # there was no plan when the epoch began
            self._check_padding(given, mark.n_rows, mark.n_padded)
            mark.record.is_exact = True

    def _check_rows(self, n_rows: int, rows: Mapping[str, tuple[int, int]]) -> None:
        reader = self._state.local_rows
        for path in reader.shapes:
            own, given = reader.slice_of(path, n_rows), rows.get(path)
            wanted = None if own is None else (own.start, own.stop)
            if given != wanted:
                raise BatchError(
                    f"a loader gave rows {given} of `{path}`, and this rank reads {wanted}",
                    hint="a loader is of one module: make another with pm.dataloader(...)",
                )

    def _check_padding(self, given: Given, n_rows: int, n_padded: int) -> None:
        """Raise `BatchError` unless the last rows of a batch do not count; every rank calls it."""
        held = self._state
        reader = held.local_rows
        PaddingCheck(
            held.programs.lifted, lambda built, batch: self._inputs(built.program, batch),
            held.shards, held.changed, reader.row_dims, reader.n_divisor, held.stream.seed,
        ).run(given, n_rows, n_padded)  # fmt: skip

    def _inputs(self, program: Program, given: Given, is_local: bool = False) -> dict[str, Tensor]:
        """Inputs by placeholder; a local batch may lack what this stage does not read."""
        leaves = flatten_inputs(given)
        check_inputs(leaves)
        takes = self._state.local_rows.takes
        wanted = {n: i for n, i in program.inputs.items() if not is_local or takes(n)}
        missing = [i.path for i in wanted.values() if i.path not in leaves]
        if missing:
            raise BatchError(f"the batch lacks {missing}; it has {sorted(leaves)}")
        return {n: leaves[i.path] for n, i in program.inputs.items() if i.path in leaves}

    def local_slice(self, name: str, global_rows: int | None = None) -> slice | None:
        """The rows of input `name` that this rank reads; None if it reads none.

        They are of the planned batch, or of one of `global_rows` rows. Raises `OptionError` if
        there is no such input, `BatchError` if the rows do not divide.
        """
        return self._state.local_rows.slice_of(name, global_rows)

    def _plan_or_none(self) -> Plan | None:
        return None if self._state_or_none is None else self._state_or_none.plan
