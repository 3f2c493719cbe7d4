"""A published run as numbers: the model's shape, its recipe, its software and its machine.

A row gives dims and degrees of parallelism. Its `model` may say whether its head is tied, whether
it has biases and which positions. A missing value takes a default, which is listed with the
prediction (`PublishedRun.assumed`):

    interleave         1, or one layer per chunk if the schedule is interleaved
    recompute          none
    vocab              51200, GPT-2's 50257 padded for tensor parallelism; 32000, that of
                       sentence-piece tokenizers since LLaMA, from arXiv number 2302 on
    dtype              bf16 on devices that have it, else fp16
    memory_rank        the fullest rank

A run is skipped only if a degree, the batch or a dim is unknown, or if something in it is not
supported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from autopar.cost.hardware import Profile, Quantity, Software, load_profile
from autopar.cost.memory import Setting
from autopar.cost.published.features import arxiv_of, is_float8, software_of_row
from autopar.cost.transformer import (
    Experts,
    Latent,
    MemoryRank,
    Order,
    Recipe,
    StepModel,
    TransformerShape,
    model_flops_per_token,
    training_dtype,
)
from autopar.errors import NotSupportedError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NOT_SUPPORTED = {
    "encoder_layers": "an encoder beside a decoder",
    "mtp_layers": "layers that predict further tokens",
}
_ORDERS: dict[str, Order] = {
    "1f1b": "1f1b", "1f1b-i": "interleaved", "interleaved": "interleaved", "gpipe": "gpipe",
    "zb-1p": "zero-bubble", "zb-h1": "zero-bubble", "zero-bubble": "zero-bubble",
    "zb-2p": "zero-bubble-2", "zb-h2": "zero-bubble-2",
}  # fmt: skip
# Words of rows, and names of Megatron-Core's --recompute-modules, as tables write them.
_RECOMPUTE = {
    "none": "none", "full": "full", "norm": "norm", "layernorm": "norm", "act": "activation",
    "moe_act": "activation", "core_attn": "attention-core", "attn": "attention-core",
    "mlp": "feed-forward", "moe": "feed-forward",
}  # fmt: skip
# A node is a domain of NVLink. Of the 72 GPUs in a rack, layouts use 64.
_DEVICES_PER_NODE = {"gb200": 64}
_LINKS = {
    "internode_bytes_per_s_per_device": "link.inter_node.s_per_byte",
    "intranode_bytes_per_s_per_device": "link.intra_node.s_per_byte",
}
_LATENT = ("kv_rank", "rotary_head_dim", "v_head_dim")
_OPEN = ("microbatch", "interleave", "sp", "recompute", "zero")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class PublishedRun:
    """One run. `step_time_s`, `memory_bytes`: the published values, or None.

    assumed: the values that the row does not give, with the defaults that they took.
    open_fields: those of its layout, which `settle` chooses.
    """

    id: str
    paper: str
    profile: Profile
    devices_per_node: int
    shape: TransformerShape
    recipe: Recipe
    software: Software
    dtype: torch.dtype
    step_time_s: float | None
    memory_bytes: float | None
    memory_rank: MemoryRank
    memory_kind: Literal["allocated", "reserved"]
    setting: Setting
    assumed: tuple[str, ...]
    open_fields: tuple[str, ...]

    def step(self, software: Software | None = None) -> StepModel:
        """The model of a step with the run's software, or with another one."""
        return StepModel.of(
            self.shape, self.recipe, software or self.software, self.profile, self.dtype,
            self.devices_per_node,
        )  # fmt: skip


@dataclass
class _Reader:
    """Reads fields of one row, or of a table in it, and notes what was assumed."""

    row: Row
    assumed: list[str] = field(default_factory=list)

    def count(self, key: str, of: Row | None = None, default: int | None = None) -> int:
        """A number of at least 1; with a default, 0 and null say that it is not given."""
        value = (self.row if of is None else of).get(key)
        if value is not None and int(value) < (default is None):
            raise NotSupportedError(f"malformed: {key} is {value}")
        if value is None and default is None:
            raise NotSupportedError(f"{key} is unknown")
        return int(value or default or 0)

    def assume(self, what: str, value: Any) -> Any:
        self.assumed.append(f"{what}: {value}")
        return value

    def usual(self, key: str, value: int, of: Row | None = None) -> int:
        """A count, or what it usually is, which is then assumed."""
        return self.count(key, of, 0) or self.assume(key, value)

    def table(self, key: str, of: Row | None = None) -> Row:
        found = (self.row if of is None else of).get(key) or {}
        if not isinstance(found, dict):
            raise NotSupportedError(f"malformed: {key} is {found!r}")
        return found


def read_row(row: Row) -> PublishedRun:
    """The run in a row.

    Raises `NotSupportedError` or `OptionError` with the reason if the row must be skipped.
    """
    reader = _Reader(row)
    extra, metric = reader.table("extra"), reader.table("metric")
    profile, devices_per_node = _machine(reader)
    shape = _shape(reader)
    dtype = row.get("dtype") or reader.assume(
        "dtype", "bf16" if training_dtype(profile) == torch.bfloat16 else "fp16"
    )
    recipe, gib = _recipe(reader, shape), metric.get("mem_gib")
    # The time of a toy is the host's.
    step_time_s = None if extra.get("toy") else _step_time_s(row, metric, shape, recipe)
    if is_float8(row) and (step_time_s or gib is None):
        dtype, gib = "bf16", None  # what libraries keep in float8 is not known
    if dtype not in _DTYPES:
        raise NotSupportedError(f"dtype {dtype!r}")
    rank = row.get("memory_rank", extra.get("memory_rank", "fullest"))
    if not isinstance(rank, int) and rank not in ("fullest", "first", "last"):
        raise NotSupportedError(f"memory of rank {rank!r}")
    if (kind := metric.get("mem_kind", "allocated")) not in ("allocated", "reserved"):
        raise NotSupportedError(f"memory of kind {kind!r}")
    arxiv, source = arxiv_of(row), str(row.get("source", ""))
    # A run that names a schedule says nothing else by leaving the rest out.
    is_open = not row.get("schedule")
    return PublishedRun(
        id=str(row["id"]),
        # A source that is no paper begins with a repository.
        paper=f"arXiv {arxiv}" if arxiv else re.split(r"[@ ]", source, maxsplit=1)[0],
        profile=profile,
        devices_per_node=devices_per_node,
        shape=shape,
        recipe=recipe,
        software=software_of_row(row, shape, recipe, dtype),
        dtype=_DTYPES[dtype],
        step_time_s=step_time_s,
        memory_bytes=None if gib is None else float(gib) * 2**30,
        memory_rank=rank,
        memory_kind=kind,
        setting="expandable" if "expandable" in extra.get("allocator", "") else "default",
        assumed=tuple(reader.assumed),
        open_fields=tuple(
            name
            for name in _OPEN
            if is_open and row.get(name) is None and (name != "interleave" or recipe.pp > 1)
        ),
    )


def _machine(reader: _Reader) -> tuple[Profile, int]:
    """The profile with the row's own rates of links, and devices per node."""
    row, name = reader.row, reader.row.get("profile")
    if not name:
        raise NotSupportedError("profile is unknown")
    if name == "b200" and "gb200" in str(row.get("hardware")).lower():
        name = "gb200"  # the same chip in a rack that feeds it more power
    profile, each = load_profile(name), _DEVICES_PER_NODE.get(name, 8)
    links = {}
    for key, value in reader.table("overrides").items():
        if key == "devices_per_node":
            each = int(value or each)
        elif value and key in _LINKS:
            links[_LINKS[key]] = Quantity(1.0 / float(value), "the row")
        elif value:
            reader.assumed.append(f"override {key} is not read; the profile's figure holds")
    return replace(profile, quantities={**profile.quantities, **links}), each


def _shape(reader: _Reader) -> TransformerShape:
    model = reader.table("model")
    layers, hidden, heads = (reader.count(k, model) for k in ("layers", "hidden", "heads"))
    ffn = reader.usual("ffn", 4 * hidden, model)
    for key, what in _NOT_SUPPORTED.items():
        if model.get(key):
            raise NotSupportedError(what)
    moe, experts, positions = reader.table("moe", model), None, model.get("positions")
    if moe:
        experts = Experts(
            reader.count("experts", moe), reader.count("topk", moe),
            reader.count("moe_ffn", moe, ffn), bool(moe.get("grouped_gemm")),
            reader.count("shared_ffn", moe, 0),
        )  # fmt: skip
    head_dim = int(moe.get("head_dim") or model.get("head_dim") or hidden // heads)
    latent, mla = None, model.get("mla")
    if isinstance(mla, dict) and all(mla.get(key) for key in (*_LATENT, "qk_head_dim")):
        latent = Latent(int(mla.get("q_rank") or 0), *(int(mla[key]) for key in _LATENT))
        head_dim = int(mla["qk_head_dim"])
    elif mla:
        reader.assume("latent attention of unknown ranks", "read as plain")
    usual_vocab = 32000 if float(arxiv_of(reader.row) or 0) >= 2302 else 51200
    return TransformerShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=reader.usual("kv_heads", heads, model),
        head_dim=head_dim,
        ffn=ffn,
        seq=reader.count("seq", model),
        vocab=reader.usual("vocab", usual_vocab, model),
        is_gated=model.get("gated", ffn != 4 * hidden or experts is not None),
        experts=experts,
        ties_head=model.get("tied"),
        has_biases=model.get("bias"),
        learns_positions=None if positions is None else positions == "learned",
        latent=latent,
        dense_layers=layers - reader.count("moe_layers", moe, layers),
        norms_heads=bool(model.get("qk_norm")) and latent is None,
    )


def _recipe(reader: _Reader, shape: TransformerShape) -> Recipe:
    row, extra, zero = reader.row, reader.table("extra"), reader.count("zero", default=0)
    tp, pp, dp, batch = (reader.count(k) for k in ("tp", "pp", "dp", "global_batch"))
    cp, ep, etp = (reader.count(k, default=1) for k in ("cp", "ep", "etp"))
    word = row.get("schedule") or "1f1b"
    if word not in _ORDERS:
        raise NotSupportedError(f"schedule {word!r}")
    order = _ORDERS[word]
    each = -(-shape.layers // pp) if order == "interleaved" else 1
    interleave = reader.usual("interleave", each) if pp > 1 else 1
    defers = extra.get("defer_embedding_wgrad_compute")
    return Recipe(
        tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=etp,
        sp=bool(row.get("sp")), zero=zero, zero_shards=extra.get("zero_shards"),
        recompute=_recompute(reader, zero),
        microbatch_size=reader.usual("microbatch", 1), global_batch=batch,
        interleave=interleave, order="interleaved" if interleave > 1 else order,
        deferred=reader.count("wgrad_deferral_limit", extra, batch) if defers else 0,
    )  # fmt: skip


def _recompute(reader: _Reader, zero: int) -> str:
    """What backward runs again. "selective" is Megatron's, or torchtitan's, whose recipes are
    ZeRO-3."""
    word = str(reader.row.get("recompute") or reader.assume("recompute", "none"))
    known = {**_RECOMPUTE, "selective": "selective" if zero == 3 else "attention-core"}
    kinds = [known.get(name.strip()) for name in word.split(",")]
    if None in kinds:
        raise NotSupportedError(f"recompute {word!r}")
    return ",".join(kind for kind in kinds if kind)


def _step_time_s(row: Row, metric: Row, shape: TransformerShape, recipe: Recipe) -> float | None:
    """The published seconds of a step, or what a published rate makes of its tokens or FLOPs."""
    if given := metric.get("iter_seconds") or row.get("derived_iter_seconds"):
        return float(given)
    batch = recipe.global_batch
    tokens = batch * shape.seq
    for key, amount, unit in (
        ("tokens_per_sec_per_gpu", tokens, recipe.n_ranks),
        ("tokens_per_sec", tokens, 1),
        ("samples_per_sec", batch, 1),
        ("tflops_per_gpu", _published_flops(row, shape, tokens), 1e12 * recipe.n_ranks),
    ):
        if metric.get(key):
            return float(amount / metric[key] / unit)
    return None


def _published_flops(row: Row, shape: TransformerShape, tokens: int) -> float:
    """FLOPs of a step as the source counts them (`flops_convention`)."""
    convention = str(row.get("flops_convention") or "")
    counts = shape.experts is None and ("96" in convention or "counts recompute" in convention)
    return tokens * model_flops_per_token(shape, counts_recompute=counts)
