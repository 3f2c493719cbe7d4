"""Which rows of an input a rank reads, and a local batch seen as a part of the global one.

A rank reads the rows that its stages split over the ranks of their mesh. The others pass through
other ranks: rows of an input are needed only where an operator reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import BatchError, NotSupportedError, OptionError
from autopar.module.agreement import Given, Rows
from autopar.program.graph import Program, flatten_inputs, row_dims
from autopar.program.lines import Delivered, StageProgram, batch_shards
from autopar.runtime.execute import batch_index
from autopar.runtime.state import StageState


@dataclass(frozen=True)
class LocalRows:
    """The rows of one rank.

    program      the planned program; its shapes are of the planned batch
    place        this rank's stages and coordinate
    batch_dims   the option of this name
    """

    program: Program
    place: StageState
    batch_dims: Mapping[str, int | None]

    def slice_of(self, path: str, global_rows: int | None = None) -> slice | None:
        """The rows of input `path` that this rank reads; None if it reads none.

        Raises `OptionError` if there is no such input, `BatchError` if ranks do not divide
        `global_rows`.
        """
        placeholders = {info.path: name for name, info in self.program.inputs.items()}
        if path not in placeholders:
            raise OptionError(
                f"there is no input {path!r}; inputs are {sorted(placeholders)}",
                hint="names are those of the planned batch",
            )
        if not self.takes(placeholders[path]):
            return None
        n_rows, (index, n_shards) = self._n_rows(path, global_rows), self._part(placeholders[path])
        n_blocks = self.place.pipeline.n_blocks  # of all stages, so that all ranks refuse alike
        if global_rows is not None and path in self.row_dims and n_rows % n_blocks:
            raise BatchError(
                f"{n_rows} rows of `{path}` do not divide over {n_blocks} ranks",
                hint="use drop_last=True in the loader, or a batch size that divides",
            )
        return slice(index * n_rows // n_shards, (index + 1) * n_rows // n_shards)

    def takes(self, placeholder: str) -> bool:
        """Whether a stage of this rank reads an input."""
        is_divisor = any(placeholder in stage.prologue_inputs for stage in self._stages)
        return is_divisor or bool(self._delivered(placeholder))

    def of_batch(self, given: Given, global_rows: int | None) -> dict[str, Rows]:
        """Path -> rows, of the inputs of a local batch that this rank reads.

        Raises `NotSupportedError` if an input is read both whole and in parts.
        """
        if mixed := self._mixed():
            raise NotSupportedError(
                f'batch="local": this plan reads {mixed} whole and in parts',
                hint="pass the global batch on every rank",
            )
        leaves = flatten_inputs(given)
        found: dict[str, Rows] = {}
        for placeholder, info in self.program.inputs.items():
            value = leaves.get(info.path)
            if not isinstance(value, Tensor) or not self.takes(placeholder):
                continue
            of, dim = self.slice_of(info.path, global_rows), self._row_dim(info.path)
            assert of is not None
            n_rows = value.shape[dim] if dim < value.dim() else 1
            found[info.path] = Rows(n_rows, (of.start, of.stop))
        return found

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Path -> shape in the planned program."""
        return {info.path: info.shape for info in self.program.inputs.values()}

    @property
    def row_dims(self) -> Mapping[str, int]:
        """Path -> the dim of the rows, of the inputs that have rows."""
        return row_dims(self.shapes, self.batch_dims)[0]

    @property
    def n_divisor(self) -> int:
        """Microbatches x ranks that split them: it divides the rows of every training batch."""
        pipeline = self.place.pipeline
        return pipeline.stages[0].n_microbatches * pipeline.n_blocks

    def why_whole(self) -> str | None:
        """Why a loader gives every rank the whole batch; None if ranks may load their own rows.

        The same on every rank.
        """
        others = sorted(path for path in self.shapes if self.row_dims.get(path) != 0)
        if others:
            return f"dim 0 of {others} is not the rows"
        if nested := sorted(path for path in self.shapes if "." in path):
            return f"{nested} are nested"
        if mixed := self._mixed():
            return f"this plan reads {mixed} whole and in parts"
        stages = self.place.pipeline.stages
        if all(_counts(stages, n) <= {1} for n in self.program.inputs):
            return "this plan does not split rows over ranks"
        return None

    def globalised(self, given: Given, global_rows: int | None) -> Given:
        """Meta tensors with the global shapes of a local batch."""
        whole: dict[str, Any] = dict(flatten_inputs(given))
        for info in self.program.inputs.values():
            value = whole.get(info.path)
            if value is not None and not isinstance(value, Tensor):
                continue
            # An input of another stage may be absent, but the graph needs its shape.
            shape = list(info.shape if value is None else value.shape)
            dtype = info.dtype if value is None else value.dtype
            if info.path in self.row_dims:
                shape[self._row_dim(info.path)] = self._n_rows(info.path, global_rows)
            whole[info.path] = torch.empty(shape, dtype=dtype, device="meta")
        if isinstance(given, Mapping):
            return whole
        return tuple(whole[str(i)] for i in range(len(whole)))

    @property
    def _stages(self) -> list[StageProgram]:
        return [self.place.pipeline.stages[k] for k in self.place.stages]

    def _delivered(self, placeholder: str) -> list[Delivered]:
        return [d for stage in self._stages for d in stage.delivered if d.source == placeholder]

    def _row_dim(self, path: str) -> int:
        return self.row_dims.get(path, 0)

    def _n_rows(self, path: str, global_rows: int | None) -> int:
        """Rows of the global input; of an input without rows, its first dim."""
        dims, accumulation = self.row_dims, self.program.accumulation
        if path in dims and global_rows is not None:
            return global_rows
        (shape,) = (i.shape for i in self.program.inputs.values() if i.path == path)
        n_parts = accumulation.n if accumulation and path in accumulation.dims else 1
        return (shape[dims.get(path, 0)] if shape else 1) * n_parts

    def _part(self, placeholder: str) -> tuple[int, int]:
        """(index, number) of the parts of the rows that this rank reads; the whole is (0, 1)."""
        counts = _counts(self._stages, placeholder)
        if len(counts) != 1 or self.program.accumulation is not None:
            return 0, 1
        (n_parts,) = counts
        item = self._delivered(placeholder)[0]
        return batch_index(item, self.place.sizes, self.place.coordinate), n_parts

    def _mixed(self) -> list[str]:
        """A local batch is cut once: the inputs that a rank reads whole and in parts."""
        refused: set[str] = set()
        pipeline = self.place.pipeline
        for mesh in pipeline.device_meshes:
            stages = [pipeline.stages[k] for k in pipeline.stages_of(mesh.first_rank)]
            counts = {name: _counts(stages, name) for name in self.program.inputs}
            mixed = {name for name, found in counts.items() if len(found) > 1}
            read = dict.fromkeys(name for stage in stages for name in stage.prologue_inputs)
            divisors = [name for name in read if self._has_rows(name)]
            if len({max(counts[n], default=1) for n in divisors}) > 1:
                mixed |= {*divisors}
            refused |= {self.program.inputs[name].path for name in mixed}
        return sorted(refused)

    def _has_rows(self, placeholder: str) -> bool:
        return self.program.inputs[placeholder].path in self.row_dims


def _counts(stages: Iterable[StageProgram], placeholder: str) -> set[int]:
    """Into how many parts of its rows some stages split an input."""
    return {
        batch_shards(item, stage.axis_sizes)
        for stage in stages
        for item in stage.delivered
        if item.source == placeholder
    }
