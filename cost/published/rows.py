"""A published run as numbers: the model's shape, its recipe, its software and its machine.

A row gives dims and degrees of parallelism. A missing value takes a default, which is listed with
the prediction (`PublishedRun.assumed`):

    interleave         1, or one layer per chunk if the schedule is interleaved
    recompute          none
    vocab              51200, GPT-2's 50257 padded for tensor parallelism; 32000, that of
                       sentence-piece tokenizers since LLaMA, from arXiv number 2302 on
    dtype              bf16 on devices that have it, else fp16

Its software (`cost/hardware/software.py`) is the one it names under "software", or

    torch-eager, torch-compiled   ZeRO-3 outside Megatron; compiled if the notes say so
    megatron-deepspeed            the notes name DeepSpeed
    transformer-engine            any other run on a device since H100 (`_AFTER_FLASH`)
    megatron-core                 from arXiv number 2205 on; if the source is no paper, runs in bf16
    megatron-2021                 earlier ones

The same rules for all rows say which of its features a run has:

    fused_attention    the notes name flash attention; or a model that came after it (gated), or
                       a device that did: A. Dao et al., arXiv 2205.14135
    dropout            a plain model without fused attention: recipes up to 2022 train with 0.1
    fp32_gradients     bf16, whose sums need it
    overlapped_sync, overlapped_tp, overlapped_experts     what the notes say is overlapped
    thrifty_dispatch   the notes name DeepEP

A row may override any feature under "software".

A run is skipped only if a degree, the batch or a dim is unknown, or if something in it is not
supported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.cost.hardware import FEATURES, Software, load_software
from autopar.cost.memory import Setting
from autopar.cost.published.memory_flags import (
    add_memory_flags,
    memory_rank_of,
    recipe_flags,
    setting_of,
    shape_flags,
)
from autopar.cost.transformer import (
    Experts,
    MemoryRank,
    Module,
    Order,
    Recipe,
    Recompute,
    TransformerShape,
)
from autopar.errors import NotSupportedError, OptionError

_ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})")
_AFTER_FLASH = ("h100", "h200", "b200", "gb200", "mi300x", "rtx-4090", "rtx-5090", "l40s", "l4")
_NO_BF16 = ("v100",)
_TP_OVERLAPPED = re.compile(r"\btp\b[^.;]*\boverlapped")
_EP_OVERLAPPED = re.compile(r"\bep communication overlapped")
_ORDERS: dict[str, Order] = {
    "1f1b": "1f1b", "1f1b-i": "interleaved", "interleaved": "interleaved", "gpipe": "gpipe",
    "zb-1p": "zero-bubble", "zb-h1": "zero-bubble", "zero-bubble": "zero-bubble",
    "zb-2p": "zero-bubble-2", "zb-h2": "zero-bubble-2",
}  # fmt: skip
# Names of Megatron-Core's --recompute-modules, as tables write them.
_MODULES: dict[str, Module] = {
    "norm": "norm", "layernorm": "norm", "act": "activation", "moe_act": "activation",
    "core_attn": "core", "attn": "core", "mlp": "feed-forward", "moe": "feed-forward",
}  # fmt: skip
_OVERRIDES = {
    "internode_bytes_per_s_per_device": "link.inter_node.s_per_byte",
    "intranode_bytes_per_s_per_device": "link.intra_node.s_per_byte",
    "devices_per_node": "devices_per_node",
}


@dataclass(frozen=True)
class PublishedRun:
    """One run. `step_time_s`, `memory_bytes`: the published values, or None.

    assumed: the values that the row does not give, with the defaults that they took.
    open_fields: those of its layout, which `open_fields.py` chooses.
    """

    id: str
    paper: str
    profile: str
    shape: TransformerShape
    recipe: Recipe
    software: Software
    dtype: str
    overrides: Mapping[str, float]
    step_time_s: float | None
    memory_bytes: float | None
    memory_rank: MemoryRank = "fullest"
    setting: Setting = "default"
    assumed: tuple[str, ...] = field(default=())
    open_fields: tuple[str, ...] = field(default=())


@dataclass
class _Reader:
    """Reads fields of one row, and notes what was assumed."""

    row: Mapping[str, Any]
    assumed: list[str] = field(default_factory=list)

    def known(self, key: str, of: Mapping[str, Any] | None = None) -> int:
        value = (self.row if of is None else of).get(key)
        if value is None:
            raise NotSupportedError(f"{key} is unknown")
        return int(value)

    def assume(self, what: str, value: Any) -> Any:
        self.assumed.append(f"{what}: {value}")
        return value


def read_row(row: Mapping[str, Any]) -> PublishedRun:
    """The run in a row.

    Raises `NotSupportedError` with the reason if the row must be skipped.
    """
    reader = _Reader(row)
    profile = row.get("profile")
    if not profile:
        raise NotSupportedError("profile is unknown")
    shape = _shape(reader)
    dtype = row.get("dtype") or reader.assume(
        "dtype", "fp16" if str(profile).startswith(_NO_BF16) else "bf16"
    )
    if dtype not in ("fp16", "bf16"):
        raise NotSupportedError(f"dtype {dtype!r}")
    recipe = _recipe(reader, shape)
    software = add_memory_flags(row, _software(row, shape, recipe, dtype))
    return PublishedRun(
        id=str(row["id"]),
        paper=_paper(str(row.get("source", ""))),
        profile=str(profile),
        shape=shape,
        recipe=recipe,
        software=software,
        dtype=dtype,
        overrides=_overrides(reader),
        step_time_s=_step_time_s(row, shape, recipe),
        memory_bytes=_memory_bytes(row),
        memory_rank=memory_rank_of(row),
        setting=setting_of(row),
        assumed=tuple(reader.assumed),
        open_fields=_open_fields(row, recipe),
    )


def _open_fields(row: Mapping[str, Any], recipe: Recipe) -> tuple[str, ...]:
    """What a run leaves open of its layout (`open_fields.py`). A run that names a schedule says
    nothing else by leaving the rest out."""
    if row.get("schedule"):
        return ()
    named = [
        name
        for name in ("microbatch", "interleave", "sp", "recompute", "zero")
        if row.get(name) is None
    ]
    return tuple(name for name in named if name != "interleave" or recipe.pp > 1)


def _shape(reader: _Reader) -> TransformerShape:
    model = reader.row.get("model") or {}
    layers, hidden, heads = (reader.known(k, model) for k in ("layers", "hidden", "heads"))
    ffn = model.get("ffn") or reader.assume("ffn", 4 * hidden)
    moe = model.get("moe")
    experts = None
    if moe:
        experts = Experts(
            reader.known("experts", moe), reader.known("topk", moe), int(moe.get("moe_ffn") or ffn),
            bool(moe.get("grouped_gemm")),
        )  # fmt: skip
    return TransformerShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(model.get("kv_heads") or reader.assume("kv_heads", heads)),
        head_dim=int((moe or {}).get("head_dim") or model.get("head_dim") or hidden // heads),
        ffn=int(ffn),
        seq=reader.known("seq", model),
        vocab=int(model.get("vocab") or reader.assume("vocab", _default_vocab(reader.row))),
        is_gated=model.get("gated", int(ffn) != 4 * hidden or experts is not None),
        experts=experts,
        **shape_flags(model),
    )


def _default_vocab(row: Mapping[str, Any]) -> int:
    arxiv = _ARXIV.search(str(row.get("source", "")))
    return 32000 if arxiv and float(arxiv[1]) >= 2302 else 51200


def _recipe(reader: _Reader, shape: TransformerShape) -> Recipe:
    row = reader.row
    tp, pp, dp = (reader.known(k) for k in ("tp", "pp", "dp"))
    word = row.get("schedule")
    if word is not None and word not in _ORDERS:
        raise NotSupportedError(f"schedule {word!r}")
    order = _ORDERS[word] if word else "1f1b"
    interleave = row.get("interleave")
    if interleave is None:
        each = -(-shape.layers // pp) if order == "interleaved" else 1
        interleave = reader.assume("interleave", each) if pp > 1 else 1
    if interleave > 1:
        order = "interleaved"
    zero = row.get("zero")
    recompute, modules = _recompute(reader, zero)
    try:
        return Recipe(
            tp=tp, pp=pp, dp=dp,
            cp=int(row.get("cp") or 1), ep=int(row.get("ep") or 1), interleave=int(interleave),
            sp=bool(row.get("sp")), zero=int(zero or 0), recompute=recompute,
            recomputed=modules,
            microbatch_size=int(row.get("microbatch") or reader.assume("microbatch", 1)),
            global_batch=reader.known("global_batch"), order=order, etp=int(row.get("etp") or 1),
            **recipe_flags(row),
        )  # fmt: skip
    except OptionError as error:
        raise NotSupportedError(str(error)) from error


def _recompute(reader: _Reader, zero: int | None) -> tuple[Recompute, tuple[Module, ...]]:
    """The kind of recompute, and the modules if the row lists them."""
    word = reader.row.get("recompute")
    if word is None:
        word = reader.assume("recompute", "none")
    match str(word):
        case "none":
            return "none", ()
        case "full":
            return "full", ()
        case "selective":  # Megatron's, or torchtitan's, whose recipes are ZeRO-3
            return ("selective" if zero == 3 else "attention-core"), ()
    modules = [_MODULES.get(name.strip()) for name in str(word).replace(" ", "").split(",")]
    known = tuple(module for module in modules if module is not None)
    if len(known) < len(modules):
        raise NotSupportedError(f"recompute {word!r}")
    return "modules", known


def _software(
    row: Mapping[str, Any], shape: TransformerShape, recipe: Recipe, dtype: str
) -> Software:
    words = " ".join(str(row.get(key) or "") for key in ("notes", "source")).lower()
    given = row.get("software") or {}
    given = {"name": given} if isinstance(given, str) else dict(given)
    try:
        software = load_software(str(given.pop("name", None) or _software_name(row, recipe, words)))
    except OptionError as error:
        raise NotSupportedError(str(error)) from error
    fused_attention = (
        software.fused_attention
        or "flash" in words
        or shape.is_gated
        or str(row["profile"]).startswith(_AFTER_FLASH)
    )
    overlapped = software.overlapped_sync
    if "overlap" in words:
        overlapped = "not overlapped" not in words and "overlap off" not in words
    derived = replace(
        software,
        fused_attention=fused_attention,
        dropout=software.dropout and not shape.is_gated and not fused_attention,
        fp32_gradients=dtype == "bf16",
        overlapped_sync=overlapped,
        overlapped_tp=_TP_OVERLAPPED.search(words) is not None,
        overlapped_experts=_EP_OVERLAPPED.search(words) is not None,
        thrifty_dispatch="deepep" in words,
    )
    if unknown := sorted(set(given) - set(FEATURES)):
        raise NotSupportedError(f"software {', '.join(unknown)}; known are {', '.join(FEATURES)}")
    return add_memory_flags(row, replace(derived, **given))


def _software_name(row: Mapping[str, Any], recipe: Recipe, words: str) -> str:
    """The software of a run that names none."""
    if recipe.zero == 3 and "megatron" not in words:
        return "torch-compiled" if "compile" in words else "torch-eager"
    if "deepspeed" in words:
        return "megatron-deepspeed"
    if str(row["profile"]).startswith(_AFTER_FLASH):
        return "transformer-engine"
    arxiv = _ARXIV.search(str(row.get("source", "")))
    is_recent = float(arxiv[1]) >= 2205 if arxiv else row.get("dtype") == "bf16"
    return "megatron-core" if is_recent else "megatron-2021"


def _overrides(reader: _Reader) -> dict[str, float]:
    """Overrides by profile key; unknown ones are listed as assumed."""
    found = {}
    for key, value in (reader.row.get("overrides") or {}).items():
        if value is None:
            continue
        if key not in _OVERRIDES:
            reader.assumed.append(f"override {key} is not read; the profile's figure holds")
        elif key.endswith("bytes_per_s_per_device"):
            found[_OVERRIDES[key]] = 1.0 / float(value)
        else:
            found[_OVERRIDES[key]] = float(value)
    return found


def _paper(source: str) -> str:
    """The paper of a source: its arXiv number, or else its first word, a repository."""
    arxiv = _ARXIV.search(source)
    return arxiv[0] if arxiv else re.split(r"[@ ]", source, maxsplit=1)[0]


def _step_time_s(row: Mapping[str, Any], shape: TransformerShape, recipe: Recipe) -> float | None:
    metric = row.get("metric") or {}
    if (row.get("extra") or {}).get("toy"):  # too small: its time is the host's
        return None
    if metric.get("iter_seconds"):
        return float(metric["iter_seconds"])
    if row.get("derived_iter_seconds"):
        return float(row["derived_iter_seconds"])
    n_gpus = recipe.tp * recipe.pp * recipe.dp * recipe.cp
    tokens = recipe.global_batch * shape.seq
    if metric.get("tokens_per_sec_per_gpu"):
        return float(tokens / metric["tokens_per_sec_per_gpu"] / n_gpus)
    if metric.get("tokens_per_sec"):
        return float(tokens / metric["tokens_per_sec"])
    if metric.get("samples_per_sec"):
        return float(recipe.global_batch / metric["samples_per_sec"])
    if metric.get("tflops_per_gpu"):
        flops = _published_flops(row, shape, tokens)
        return float(flops / (metric["tflops_per_gpu"] * 1e12) / n_gpus)
    return None


def _published_flops(row: Mapping[str, Any], shape: TransformerShape, tokens: int) -> float:
    """FLOPs of a step as the source counts them (`flops_convention`).

    Sources that count recompute use equation 3 of arXiv 2104.04473.
    """
    convention = str(row.get("flops_convention") or "")
    counts_recompute = "96" in convention or "counts recompute" in convention
    if counts_recompute and shape.experts is None:
        s, h, layers = shape.seq, shape.hidden, shape.layers
        per_token = 96 * layers * h**2 * (1 + s / (6 * h) + shape.vocab / (16 * layers * h))
        return tokens * per_token
    return tokens * shape.model_flops_per_token


def _memory_bytes(row: Mapping[str, Any]) -> float | None:
    gib = (row.get("metric") or {}).get("mem_gib")
    return None if gib is None else float(gib) * 2**30
