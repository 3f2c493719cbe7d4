"""price."""

from autopar.cost.price.prediction import collectives_of, link_between, predict, timeline_of

__all__ = [
    "collectives_of",
    "link_between",
    "predict",
    "timeline_of",
]
