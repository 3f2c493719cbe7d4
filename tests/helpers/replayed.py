"""Regions on a CPU whose results are lost when the next step begins, as those of CUDA graphs."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from functools import wraps

from torch import Tensor

# Thread -> the results of its regions in this step. Ranks are threads.
_results: dict[int, list[Tensor]] = defaultdict(list)


def graphed(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """In place of the decorator of generated files; results have memory of their own."""

    @wraps(function)
    def region(*tensors: Tensor) -> tuple[Tensor, ...]:
        results = tuple(result.clone() for result in function(*tensors))
        _results[threading.get_ident()] += results
        return results

    return region


def overwrite_results() -> int:
    """What may be there once another step has begun: NaN. Returns how many tensors were lost."""
    lost = _results.pop(threading.get_ident(), [])
    for tensor in lost:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
    return len(lost)
