"""The software of a published run, and which of its features the row names.

The software (`cost/hardware/software.py`) is the one that the row names under "software", or

    torch-eager, torch-compiled   ZeRO-3 outside Megatron; compiled if the notes say so
    megatron-deepspeed            the notes name DeepSpeed
    transformer-engine            any other run on a device since H100 (`_AFTER_FLASH`)
    megatron-core                 from arXiv number 2205 on; if the source is no paper, runs in bf16
    megatron-2021                 earlier ones

The same rules for all rows say which of its features a run has:

    fused_attention      the notes name flash attention; or a model that came after it (gated), or
                         a device that did: A. Dao et al., arXiv 2205.14135
    float8               the dtype names it
    dropout              a plain model without fused attention: recipes up to 2022 train with 0.1
    fp32_gradients       bf16, whose sums need it
    overlapped_sync, overlapped_tp, overlapped_experts     what the notes say is overlapped
    thrifty_dispatch     the notes name DeepEP
    cuda_graphs          the notes name them
    transformer_engine   Megatron-Core on devices since H100, unless `extra` has another
                         "implementation"
    loss                 Transformer Engine's if `extra` says so, else the software's own; a row's
                         `fused_loss` says if that is fused

A row may override any feature under "software".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from autopar.cost.hardware import FEATURES, Loss, Software, load_software
from autopar.cost.transformer import Recipe, TransformerShape
from autopar.errors import NotSupportedError

_ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})")
_AFTER_FLASH = ("h100", "h200", "b200", "gb200", "mi300x", "rtx-4090", "rtx-5090", "l40s", "l4")
_TP_OVERLAPPED = re.compile(r"\btp\b[^.;]*\boverlapped")
_EP_OVERLAPPED = re.compile(r"\bep communication overlapped")


def software_of_row(
    row: Mapping[str, Any], shape: TransformerShape, recipe: Recipe, dtype: str
) -> Software:
    """The software of a row. Raises `AutoparError` for an unknown one, or feature."""
    words = " ".join(str(row.get(key) or "") for key in ("notes", "source")).lower()
    given, extra = row.get("software") or {}, row.get("extra") or {}
    given = {"name": given} if isinstance(given, str) else dict(given)
    software = load_software(str(given.pop("name", None) or _name(row, recipe, words)))
    is_new = str(row["profile"]).startswith(_AFTER_FLASH)
    fused_attention = software.fused_attention or "flash" in words or shape.is_gated or is_new
    overlapped = software.overlapped_sync
    if "overlap" in words:
        overlapped = "not overlapped" not in words and "overlap off" not in words
    derived: dict[str, Any] = {
        "fused_attention": fused_attention,
        "dropout": software.dropout and not shape.is_gated and not fused_attention,
        "fp32_gradients": dtype == "bf16",
        "float8": is_float8(row),
        "overlapped_sync": overlapped,
        "overlapped_tp": _TP_OVERLAPPED.search(words) is not None,
        "overlapped_experts": _EP_OVERLAPPED.search(words) is not None,
        "thrifty_dispatch": "deepep" in words,
        "cuda_graphs": "cuda graph" in words and "no cuda graph" not in words,
        "wide_workspace": extra.get("cublas_workspace") == ":4096:8",
        "muon": extra.get("optimizer") == "muon",
    }
    if (is_fused := given.pop("fused_loss", None)) is not None:
        kinds = ("copied", "in-place") if software.fused_optimizer else ("fused", "torch")
        derived["loss"] = kinds[not is_fused]
    if extra.get("cross_entropy_fusion_impl") == "te":
        derived["loss"] = "engine"
    if unknown := sorted(set(given) - set(FEATURES)):
        raise NotSupportedError(f"software {', '.join(unknown)}; known are {', '.join(FEATURES)}")
    if (loss := given.get("loss", software.loss)) not in get_args(Loss):
        raise NotSupportedError(f"software loss {loss!r}; known are {', '.join(get_args(Loss))}")
    new_attention = given.get("new_attention", software.new_attention)
    implementation = extra.get("implementation", "transformer_engine" if new_attention else "")
    derived["transformer_engine"] = implementation == "transformer_engine"
    return replace(software, **derived | given)


def arxiv_of(row: Mapping[str, Any]) -> str | None:
    """The arXiv number of a row's source, if that is a paper there."""
    found = _ARXIV.search(str(row.get("source", "")))
    return found[1] if found else None


def is_float8(row: Mapping[str, Any]) -> bool:
    """Whether a row's layers multiply in float8."""
    return "fp8" in str(row.get("dtype")).lower()


def _name(row: Mapping[str, Any], recipe: Recipe, words: str) -> str:
    """The software of a run that names none."""
    if recipe.zero == 3 and "megatron" not in words:
        return "torch-compiled" if "compile" in words else "torch-eager"
    if "deepspeed" in words:
        return "megatron-deepspeed"
    if str(row["profile"]).startswith(_AFTER_FLASH):
        return "transformer-engine"
    arxiv = arxiv_of(row)
    is_recent = float(arxiv) >= 2205 if arxiv else row.get("dtype") == "bf16"
    return "megatron-core" if is_recent else "megatron-2021"
