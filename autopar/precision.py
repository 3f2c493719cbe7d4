"""What half precision is computed in where ATen does not say so itself: sums and statistics."""

from __future__ import annotations

import torch


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for float16 and bfloat16, as ATen's reductions do inside; others stay."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
