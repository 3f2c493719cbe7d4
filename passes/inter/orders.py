"""Which schedules a request allows, and how many stages a rank has in them.

    one stage         1f1b, or gpipe if asked for: the microbatches run one after the other
    one a rank        1f1b, gpipe, zero-bubble
    several a rank    interleaved (v of them); zero-bubble-v and dualpipe-v (two)

Stages that share ranks are equal submeshes with equal views, so that tensors stay where they are.
"""

from __future__ import annotations

from typing import NamedTuple

from autopar.errors import OptionError
from autopar.manual import Manual
from autopar.options import Options
from autopar.schedule import CHUNKS, devices_of

# The schedules of stages of any size.
PLAIN = ("1f1b", "gpipe")
# Stages a rank that the search tries. Published layouts have up to 12.
_SEARCHED_CHUNKS = (1, 2, 3, 4, 6, 8, 12)


class PipelineOrder(NamedTuple):
    """A schedule, and the stages of each rank."""

    schedule: str
    n_chunks: int = 1

    def devices(self, n_devices: int) -> tuple[int, ...]:
        """The device of every stage."""
        return devices_of(self.schedule, n_devices, self.n_chunks)


def plain_order(options: Options) -> str:
    """The schedule of a single stage, and of stages of any size. "auto" is 1f1b: it is as fast as
    gpipe and keeps fewer activations."""
    return "gpipe" if options.schedule == "gpipe" else "1f1b"


def has_plain_order(options: Options) -> bool:
    """May stages be of any size? Other schedules are of equal stages."""
    return options.schedule in ("auto", *PLAIN)


def orders_of(options: Options) -> list[PipelineOrder]:
    """The schedules of Megatron's pipelines of equal stages, and of `manual`; "auto" is 1f1b.

    Raises `OptionError` if `manual` has a number of stages a rank that `schedule` does not take.
    """
    if options.manual is not None:
        return [_order_asked_for(options.manual, options.schedule)]
    return _orders_with_chunks("1f1b" if options.schedule == "auto" else options.schedule)


def other_orders(options: Options) -> list[PipelineOrder]:
    """The schedules other than the plain ones that a request allows, the simplest first.

    "auto" is without dualpipe-v, whose bubble is not below zero-bubble-v's: (p - 1)(f + b - w) is
    at least (p - 1) max(b, 2(b - w)) where f = b >= w (`autopar/schedule/orders.py`).
    """
    if options.schedule == "auto" and options.manual is None:
        words = ("interleaved", "zero-bubble", "zero-bubble-v")
        return [order for word in words for order in _orders_with_chunks(word)]
    return [] if has_plain_order(options) else orders_of(options)


def _orders_with_chunks(word: str) -> list[PipelineOrder]:
    fewest, most = CHUNKS[word]
    return [PipelineOrder(word, n) for n in _SEARCHED_CHUNKS if fewest <= n <= (most or n)]


def _order_asked_for(manual: Manual, word: str) -> PipelineOrder:
    n_chunks = manual.interleave
    if word == "auto":
        return PipelineOrder("1f1b" if n_chunks == 1 else "interleaved", n_chunks)
    fewest, most = CHUNKS[word]
    if n_chunks == 1 and fewest == most:
        n_chunks = fewest
    if n_chunks < fewest or (most is not None and n_chunks > most):
        raise OptionError(
            f"Manual(interleave={manual.interleave}) with schedule={word!r}",
            hint=f"give interleave={fewest}{'' if most == fewest else ' or more'}, or another "
            "schedule",
        )
    return PipelineOrder(word, n_chunks)
