"""The runtime's own collectives and messages, over process groups of the actual backend.

A timed call is what a generated program calls (`runtime/groups/group.py`), so it includes copies
into and out of the backend's buffers. Before each call every rank computes for a while, as in a
step, so ranks do not arrive at the same moment. `send_recv` is half of a round trip.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.calibration.samples import SampleGrid, TransferSample
from autopar.calibration.timing import TimedCall, medians_s
from autopar.mesh import LogicalMesh
from autopar.placement import Split
from autopar.runtime.collectives import DistMessenger, Messenger
from autopar.runtime.groups import Group, make_groups

_ROWS, _COLUMNS = Split(0), Split(1)
_WIDTH = 64
_PREPARED = 192  # rows and columns of the matmul before every call


def transfer_samples(
    group_sizes: Sequence[int], turns: float, grid: SampleGrid, device: torch.device
) -> list[TransferSample]:
    """Collectives over groups of these sizes, side by side in the world; and messages in pairs, if
    the number of ranks is even."""
    cases: list[TimedCall] = []
    samples: list[TransferSample] = []
    messenger = DistMessenger(device)
    work = torch.randn(_PREPARED, _PREPARED, device=device)
    for n_ranks in group_sizes:
        group = _group(n_ranks)
        for size_bytes in grid.transfer_bytes:
            for kind, case in _calls(group, size_bytes, device, partial(torch.mm, work, work)):
                cases.append(case)
                samples.append(TransferSample(kind, size_bytes, n_ranks, turns, 0.0))
    for size_bytes in grid.transfer_bytes if messenger.n_ranks % 2 == 0 else ():
        cases.append(_message(messenger, size_bytes, device))
        samples.append(TransferSample("send_recv", size_bytes, 2, turns, 0.0))
    times_s = medians_s(cases, device, grid.sample_s, grid.n_rounds)
    return [
        TransferSample(s.kind, s.size_bytes, s.n_ranks, turns, time_s)
        for s, time_s in zip(samples, times_s, strict=True)
    ]


def _group(n_ranks: int) -> Group:
    """This rank's group of `n_ranks` consecutive ranks of the world."""
    n_groups = dist.get_world_size() // n_ranks
    mesh = LogicalMesh.unpriced((n_groups, n_ranks), ("outer", "inner"))
    return make_groups(mesh)[(1,)]


def _calls(
    group: Group, size_bytes: int, device: torch.device, prepare: partial[Tensor]
) -> Iterator[tuple[str, TimedCall]]:
    """Every collective at `size_bytes` as NCCL counts them."""
    rows = max(size_bytes // 4 // _WIDTH // group.size, 1) * group.size
    whole = torch.randn(rows, _WIDTH, device=device)
    piece = whole[: rows // group.size].contiguous()
    yield "all_reduce", TimedCall(lambda i: group.all_reduce(whole), prepare)
    yield "all_gather", TimedCall(lambda i: group.all_gather(piece, _ROWS), prepare)
    yield "reduce_scatter", TimedCall(lambda i: group.reduce_scatter(whole, _ROWS), prepare)
    yield "all_to_all", TimedCall(lambda i: group.all_to_all(whole, _ROWS, _COLUMNS), prepare)


def _message(messenger: Messenger, size_bytes: int, device: torch.device) -> TimedCall:
    """A round trip to the other rank of the pair."""
    peer = messenger.rank ^ 1
    value = torch.randn(max(size_bytes // 4, 1), device=device)
    receive = (tuple(value.shape), value.dtype, peer)

    def there_and_back(i: int) -> None:
        if messenger.rank < peer:
            sent = messenger.post([(value, peer)], [])
            messenger.post([], [receive]).wait_received()
        else:
            messenger.post([], [receive]).wait_received()
            sent = messenger.post([(value, peer)], [])
        sent.wait_sent()

    return TimedCall(there_and_back, share=0.5)
