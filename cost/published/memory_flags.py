"""Flags of a row that move memory, as the functional tests of Megatron-Core state them.

A row's `model` may say whether its head is tied, whether it has biases and which positions, and
its `extra` how the layers are implemented and by which loss kernel. What a row leaves open:

    transformer_engine   Megatron-Core on devices since H100 (`Software.new_attention`)
    loss                 Megatron's own: "native" if it is fused, else in place
    memory_rank          the fullest rank
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.cost.hardware import Software
from autopar.cost.memory import Setting
from autopar.cost.transformer import MemoryRank
from autopar.errors import NotSupportedError

_NOT_SUPPORTED = {
    "encoder_layers": "an encoder beside a decoder",
    "mtp_layers": "layers that predict further tokens",
}


def shape_flags(model: Mapping[str, Any]) -> dict[str, bool | None]:
    """What a model's flags say of `TransformerShape`.

    Raises `NotSupportedError` for parts that the shape has no field for.
    """
    for key, what in _NOT_SUPPORTED.items():
        if model.get(key):
            raise NotSupportedError(what)
    positions = model.get("positions")
    return {
        "ties_head": model.get("tied"),
        "has_biases": model.get("bias"),
        "learns_positions": None if positions is None else positions == "learned",
    }


def memory_rank_of(row: Mapping[str, Any]) -> MemoryRank:
    """Whose peak a row states. Raises `NotSupportedError` for a word that is unknown."""
    match row.get("memory_rank", _extra(row).get("memory_rank")):
        case None:
            return "fullest"
        case int() | "fullest" | "first" | "last" as rank:
            return rank
        case other:
            raise NotSupportedError(f"memory of rank {other!r}")


def recipe_flags(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row's flags say of `Recipe`."""
    extra = _extra(row)
    defers = extra.get("defer_embedding_wgrad_compute")
    return {
        "zero_shards": extra.get("zero_shards"),
        "deferred": int(extra.get("wgrad_deferral_limit") or row["global_batch"]) if defers else 0,
    }


def setting_of(row: Mapping[str, Any]) -> Setting:
    """How a row's allocator is set."""
    return "expandable" if "expandable" in _extra(row).get("allocator", "") else "default"


def add_memory_flags(row: Mapping[str, Any], software: Software) -> Software:
    """The software of a row with what its flags say of memory."""
    extra = _extra(row)
    layers = extra.get("implementation")
    has_engine = software.new_attention if layers is None else layers == "transformer_engine"
    is_engines = extra.get("cross_entropy_fusion_impl") == "te"
    is_fused = software.fused_loss or is_engines
    is_megatron = software.fused_optimizer
    flags = {
        "fused_loss": is_fused,
        "engine_loss": is_engines,
        "copied_loss": is_megatron and is_fused and not is_engines,
        "in_place_loss": is_megatron and not is_fused,
        "transformer_engine": has_engine,
        "wide_workspace": extra.get("cublas_workspace") == ":4096:8",
        "muon": extra.get("optimizer") == "muon",
    }
    given = row.get("software")
    overrides = given if isinstance(given, dict) else {}
    return replace(software, **{name: overrides.get(name, flag) for name, flag in flags.items()})


def _extra(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return row.get("extra") or {}
