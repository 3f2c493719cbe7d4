"""The dtype of sums and statistics of half-precision tensors, outside of ATen's kernels."""

from __future__ import annotations

import torch


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for float16 and bfloat16, as inside ATen's reductions; others stay."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
