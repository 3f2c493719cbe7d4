"""The items of one transformer layer on one rank, for one microbatch.

A rank has T = b s / cp tokens. Outside the tensor-parallel parts, sequence parallelism leaves it
T' = T / tp of them (Korthikanti et al., arXiv 2205.05198, section 4). Widths are bytes of an
element. Every item states the bytes that it reads and writes. Without fused attention, the kept
bytes reproduce that paper's sbh (34 + 5 as/h) (its equation 1), and its divisions by tp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cost.hardware import Software
from autopar.cost.transformer.recipe import Recipe
from autopar.cost.transformer.shape import TransformerShape
from autopar.cost.transformer.work import Item, Kernel, elementwise, exchange

# Kinds of collectives around a tensor-parallel part, forward and backward: without sequence
# parallelism (Megatron's f and g), and with it. There, backward gathers the input again for the
# weight's gradient.
ENTER = ((), ("all_reduce",)), (("all_gather",), ("all_gather", "reduce_scatter"))
LEAVE = (("all_reduce",), ()), (("reduce_scatter",), ("all_gather",))
_GATHER, _SCATTER = ("all_gather",), ("reduce_scatter",)
_DISPATCH = ("dispatch",)  # an all_to_all that `StepModel` may make cheaper
_STATISTICS_BYTES = 4  # per row and head: the log-sum-exp that fused attention keeps


@dataclass(frozen=True)
class LayerModel:
    """A layer of a shape under a recipe; `width` is the bytes of an activation's element."""

    shape: TransformerShape
    recipe: Recipe
    software: Software
    width: int = 2

    @property
    def dense(self) -> LayerModel:
        """A layer without experts."""
        return replace(self, shape=self.shape.dense)

    @property
    def tokens(self) -> float:
        """T: tokens of one microbatch on one rank."""
        return self.recipe.microbatch_size * self.shape.seq / self.recipe.cp

    @property
    def outer_tokens(self) -> float:
        """T': tokens outside the tensor-parallel parts."""
        return self.tokens / (self.recipe.tp if self.recipe.sp else 1)

    @property
    def words(self) -> float:
        """A rank's rows of the vocabulary."""
        return self.shape.vocab / self.recipe.tp

    @property
    def input_bytes(self) -> float:
        """Bytes of a layer's input: the residual stream."""
        return self.outer_tokens * self.shape.hidden * self.width

    @property
    def gradient_width(self) -> int:
        """Bytes of a gradient's element, as it is accumulated and reduced."""
        return 4 if self.software.fp32_gradients else self.width

    @property
    def accumulated_bytes(self) -> float:
        """Bytes per weight and microbatch to add a gradient: read it, read and write the sum.

        0.0 if the matmul's kernel accumulates, or if shards accumulate (ZeRO-3).
        """
        recipe, software = self.recipe, self.software
        if recipe.n_microbatches == 1 or recipe.zero == 3 or software.fused_accumulation:
            return 0.0
        return self.width + 2 * self.gradient_width

    @cached_property
    def items(self) -> list[Item]:
        return [*self._attention(), *self._feed_forward()]

    def matmul(
        self, name: str, m: float, n: float, k: float, *, has_bias: bool = False,
        is_kept: bool = True, is_exact: bool = False, n_experts: int = 0,
    ) -> Item:  # fmt: skip
        """A matmul with a weight, m k, k n -> m n, or one for each expert of a rank. Backward has
        one more for each operand, and perhaps kernels that sum a bias's gradient and add the
        weight's to earlier ones.

        A result that is not kept goes into the sum with the residual stream, which adds its bias.
        In float8 unless `is_exact`: casts read an operand once and write it twice, once transposed.
        """
        width, added, n_times = self.width, self.accumulated_bytes, max(n_experts, 1)
        in_float8, cast = self.software.float8 and not is_exact, width + 2
        read = 1 if in_float8 else width
        flops, moved = 2.0 * m * n * k, read * (m * k + k * n) + width * m * n
        one = Kernel("matmul", n_times * flops, n_times * moved, n_times, in_float8)
        weights = k * n / self.recipe.n_microbatches  # cast once a step
        there = [cast * (m * k + weights)] if in_float8 else []
        back = [cast * m * n] if in_float8 else []
        back += [width * m * n if has_bias and is_kept else 0.0, k * n * added]
        forward, backward = (
            (*ones, *(Kernel("memory", 0.0, n_times * size) for size in beside if size))
            for ones, beside in (((one,), there), ((one, one), back))
        )
        kept_bytes = n_times * m * n * width if is_kept else 0.0
        weight_bytes = n_times * width * (m * k + m * n)
        return Item(
            name, "matmul", forward, backward, kept_bytes, 0.0, weight_bytes,
            n_times * n * (k + has_bias), "expert_dp" if n_experts else "dp",
        )  # fmt: skip

    def norm(self, name: str, size_bytes: float = 0.0, n_features: int = 0) -> Item:
        """A norm of so many bytes; by default of a layer's input."""
        size = size_bytes or self.input_bytes
        n = n_features or self.shape.hidden * (1 if self.shape.is_gated else 2)
        if self.software.fused_kernels or not self.shape.is_gated:  # torch's LayerNorm is a kernel
            return elementwise(name, 2 * size, 3 * size, size, n_parameters=n)
        # Cast, square, mean, rsqrt, two multiplications, cast back, with copies in float32.
        return elementwise(name, 11 * size, 16 * size, 3 * size, 6, 10, n_parameters=n)

    def boundary(self, kinds: Sequence[tuple[Sequence[str], Sequence[str]]]) -> Iterator[Item]:
        """The collectives on entry to a tensor-parallel part (`ENTER`), or on exit (`LEAVE`)."""
        recipe, size = self.recipe, self.tokens * self.shape.hidden * self.width
        copies = recipe.sp and not self.software.sequence_first
        if recipe.tp > 1:
            yield exchange("boundary", size, *kinds[recipe.sp], copies=copies)

    def _residual(self, name: str) -> Item:
        """Bias, dropout and the sum with the residual stream."""
        size, drops, is_fused = self.input_bytes, self.software.dropout, self.software.fused_kernels
        mask = size / self.width * drops
        launches = 1 if is_fused else 1 + 2 * drops
        forward = 3 * size + mask + (0.0 if is_fused else 4 * size * drops)
        backward = size + drops * size + mask
        return elementwise(name, forward, backward, mask, launches, launches, size)

    def _attention(self) -> Iterator[Item]:
        shape, tp, width, T = self.shape, self.recipe.tp, self.width, self.tokens
        h, q, biased = shape.hidden, shape.query_features / tp, bool(shape.has_biases)
        k = max(shape.key_features / tp, shape.head_dim)
        yield self.norm("attention norm")
        yield from self.boundary(ENTER)
        v, narrow = shape.value_features / tp, shape.latent
        if narrow is not None:
            yield self.matmul("latent", T, narrow.q_rank + narrow.kv_rank + narrow.rotary, h)
            yield self.matmul("queries", T, q, narrow.q_rank or h)
            keys = shape.heads / tp * (shape.head_dim + narrow.value)
            yield self.matmul("keys and values", T, keys, narrow.kv_rank)
            size = T * (narrow.q_rank + narrow.kv_rank) * width
            n = narrow.q_rank + narrow.kv_rank
            yield elementwise("latent norm", 2 * size, 3 * size, size, 2, 2, n_parameters=n)
        else:
            yield self.matmul("qkv", T, q + 2 * k, h, has_bias=biased)
            if shape.norms_heads:
                yield self.norm("head norm", T * (q + k) * width, 2 * shape.head_dim)
        if shape.is_gated or narrow:
            size = T * (q + k) * width
            launches, passes = (1, 2) if self.software.fused_kernels else (10, 10)
            # Every head has a copy of the rotary part of latent keys.
            kept = T * shape.heads / tp * narrow.rotary * width if narrow else 0.0
            yield elementwise("rotary", passes * size, passes * size, kept, launches, launches)
        yield from self._core(q, k, v)
        yield self.matmul("attention output", T, h, v, has_bias=biased, is_kept=False)
        yield from self.boundary(LEAVE)
        yield self._residual("attention residual")

    def _core(self, q: float, k: float, v: float) -> Iterator[Item]:
        """Scores, softmax and the weighted sum of values."""
        shape, width, T = self.shape, self.width, self.tokens
        heads = shape.heads / self.recipe.tp
        if self.recipe.cp > 1:  # keys, values and their gradients go round the ring once
            size = 2 * T * k * width * self.recipe.cp
            yield exchange("ring", size, _GATHER, (*_GATHER, *_SCATTER), "cp")
        flops, context = 2.0 * T * shape.seq * (q + v), T * v * width
        if self.software.fused_attention:  # a causal kernel skips what is masked
            moved = T * (q + v + 2 * k) * width
            # Transformer Engine also keeps the result in the order that the kernel wrote.
            twice = context * self.software.transformer_engine
            yield Item(
                "fused attention", "core",
                (Kernel("attention", flops / 2, moved),),
                (Kernel("attention", 2.5 * flops / 2, 2 * moved),),
                heads * T * _STATISTICS_BYTES + twice, context,
            )  # fmt: skip
            return
        scores = heads * T * shape.seq  # elements
        one = Kernel("matmul", flops / 2, width * (T * (q + k) + scores))
        yield Item("scores", "core", (one,), (one, one))
        # Fused, one kernel reads and writes the scores. Eager, scale, mask and softmax are three.
        n, passes = (1, 2) if self.software.fused_kernels else (3, 6)
        size = scores * width
        yield elementwise("softmax", passes * size, 3 * size, size, n, n, part="core")
        if self.software.dropout:
            moved, kept = scores * (2 * width + 1), scores * (1 + width)
            yield elementwise("attention dropout", moved, moved, kept, part="core")
        yield Item("weighted values", "core", (one,), (one, one), 0.0, context)

    def _feed_forward(self) -> Iterator[Item]:
        yield self.norm("mlp norm")
        if self.shape.experts is None:
            yield from self.boundary(ENTER)
            *most, down = self._mlp(self.tokens, self.shape.ffn / self.recipe.tp)
            yield from most
            ends = (down, *self.boundary(LEAVE), self._residual("mlp residual"))
            yield from (replace(item, is_last=True) for item in ends)
        else:
            yield from self._experts()
            yield self._residual("mlp residual")

    def _mlp(self, tokens: float, ffn: float, n_experts: int = 0) -> Iterator[Item]:
        """Two or three matmuls with the activation between, once or for each expert of a rank."""
        shape, width, h = self.shape, self.width, self.shape.hidden
        wide, rows = (2 if shape.is_gated else 1) * ffn, tokens / max(n_experts, 1)
        biased = bool(shape.has_biases)
        yield self.matmul("mlp up", rows, wide, h, has_bias=biased, n_experts=n_experts)
        moved, out = tokens * wide * width, tokens * ffn * width
        # An expert's activations are scaled by the router's probability, in SwiGLU's own kernel.
        scaled = 0.0 if shape.experts is None or shape.is_gated else out
        if self.software.fused_kernels:
            yield elementwise("activation", moved + out, 2 * moved + out, out + scaled)
        elif shape.is_gated:  # SiLU and multiplication, each a kernel with its own tensor
            yield elementwise("activation", 5 * out, 8 * out, 2 * out, 2, 4)
        else:  # bias, then GELU
            yield elementwise("activation", 4 * out, 5 * out, out, 2, 2)
        yield self.matmul(
            "mlp down", rows, h, ffn, has_bias=biased, n_experts=n_experts, is_kept=False
        )

    def _experts(self) -> Iterator[Item]:
        """Router, rows sent to the ranks of their experts, matmuls there, rows sent back."""
        recipe, h, experts = self.recipe, self.shape.hidden, self.shape.experts
        assert experts is not None
        T = self.outer_tokens
        scores = T * experts.n_experts * 4.0  # the router computes in float32
        yield self.matmul("router", T, experts.n_experts, h, is_exact=True)
        yield elementwise("routing", 6 * scores, 6 * scores, scores, 12, 12)
        rows = T * experts.chosen
        size = rows * h * self.width
        shared = size * recipe.etp
        # A thrifty dispatch takes tokens in their order, and its combine sums them.
        permutes = not (self.software.thrifty_dispatch and recipe.ep > 1)
        if permutes:
            yield elementwise("permute", 2 * size, 2 * size, 0.0, 2, 2)
        if recipe.ep > 1:
            yield exchange("dispatch", size, _DISPATCH, _DISPATCH, "ep")
        if recipe.etp > 1:  # ranks that share an expert see all their tokens
            yield exchange("gather rows", shared, _GATHER, _SCATTER, "etp")
        yield elementwise("sort by expert", 2 * shared, 2 * shared, shared, 2, 2)
        n_here = max(experts.n_experts // recipe.ep, 1)
        yield from self._mlp(rows * recipe.etp, experts.ffn / recipe.etp, n_here)
        yield elementwise("sort back", 2 * shared, 2 * shared, 0.0, 2, 2)
        if recipe.etp > 1:
            yield exchange("scatter rows", shared, _SCATTER, _GATHER, "etp")
        if recipe.ep > 1:
            yield exchange("combine", size, _DISPATCH, _DISPATCH, "ep")
        if permutes:
            yield elementwise("unpermute", 2 * size, 3 * size, 0.0, 2, 2)
        if experts.shared_ffn:
            yield from self.boundary(ENTER)
            yield from self._mlp(self.tokens, experts.shared_ffn / recipe.tp)
            yield from self.boundary(LEAVE)
