"""lowering."""

from autopar.passes.lowering.abridger import Abridger
from autopar.passes.lowering.joining import PlacedStage, join
from autopar.passes.lowering.replaying import replay, replay_ends, stage_record

__all__ = [
    "Abridger",
    "PlacedStage",
    "join",
    "replay",
    "replay_ends",
    "stage_record",
]
