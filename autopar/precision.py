"""Which dtypes a step uses: those of storage, of use, of reductions, and of sums in kernels.

    precision      stored     used       gradients reduced    loss scale
    model          as it is   as it is   as it is
    bf16-mixed     float32    bfloat16   float32
    fp16-mixed     float32    float16    float32              dynamic
    bf16-autocast  float32    by operator: torch.autocast's lists; float32
    fp64           float64    float64    float64

Mixed precision stores half-precision models in float32, too; float64 stays. The mixed policies are
those of FSDP2 (`MixedPrecisionPolicy`): floating parameters and inputs are cast once at the door,
buffers stay. `lifted` makes every floating dtype of a captured program float64, to verify a plan of
any precision.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

_USED = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
_AUTOCAST = {"bf16-autocast": torch.bfloat16}
WORDS = ("model", *_USED, *_AUTOCAST, "fp64")


@dataclass(frozen=True)
class Precision:
    """What the options `precision`, `reduce_dtype` and `master_weights` mean together.

    reduce_dtype     of gradients across ranks and microbatches; float32 if None. Only where
                     parameters are used in another dtype than they are stored in
    master_weights   of "model": parameters in half precision are stored in float32
    is_lifted        everything floating is float64
    """

    name: str = "model"
    reduce_dtype: torch.dtype | None = None
    master_weights: bool = False
    is_lifted: bool = False

    @staticmethod
    def of(name: str) -> Precision:
        """The policy of the option `precision` alone."""
        return Precision(name, is_lifted=name == "fp64")

    @property
    def keeps_casts(self) -> bool:
        """If lifted: do casts that change nothing stay, so that operators are those of a plan?"""
        return self.name != "fp64"

    def lifted(self) -> Precision:
        """The same with everything floating as float64."""
        return replace(self, is_lifted=True)

    @property
    def door_dtype(self) -> torch.dtype | None:
        """The dtype that floating parameters and inputs are cast to; None: none is cast."""
        return _USED.get(self.name)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of `torch.autocast` around the model and its loss; None: there is none."""
        return _AUTOCAST.get(self.name)

    def autocast(self) -> AbstractContextManager[Any]:
        """`torch.autocast`, on the CPU, if the policy is one of it."""
        dtype = self.autocast_dtype
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype)

    @property
    def casts(self) -> bool:
        """Are parameters stored in float32 at least, and cast for use where that is narrower?"""
        used = self.door_dtype or self.autocast_dtype
        return used is not None or self.master_weights

    def used(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter of `dtype` is used; autocast casts it per operator."""
        if self.autocast_dtype is not None:
            return self.stored(dtype)
        return (self.door_dtype or dtype) if dtype.is_floating_point else dtype

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter of `dtype` is stored."""
        return working_dtype(dtype) if self.casts else dtype

    def reduced(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype in which its gradients are reduced; None: that of use."""
        return self.reduced_from(self.used(dtype), self.stored(dtype))

    def reduced_from(self, used: torch.dtype, stored: torch.dtype) -> torch.dtype | None:
        """The dtype in which gradients of a parameter are reduced that is used in `used`."""
        if self.is_lifted or used == stored:
            return None
        return self.reduce_dtype or torch.float32


AS_IT_IS = Precision()


def no_autocast() -> AbstractContextManager[Any]:
    """Operators run in the dtypes of their operands, whatever is around."""
    return torch.autocast("cpu", enabled=False)


def lifted_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for any floating dtype, complex128 for any complex one; others stay."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def widened(value: torch.Tensor) -> torch.Tensor:
    """The tensor in its `lifted_dtype`."""
    return value.to(lifted_dtype(value.dtype))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for float16 and bfloat16, as inside ATen's reductions; others stay."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
