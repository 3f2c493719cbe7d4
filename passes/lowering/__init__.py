"""lowering."""

from autopar.passes.lowering.abridger import Abridger
from autopar.passes.lowering.joining import LaidStage, join
from autopar.passes.lowering.replaying import replay, replay_ends, stage_record

__all__ = [
    "Abridger",
    "LaidStage",
    "join",
    "replay",
    "replay_ends",
    "stage_record",
]
