"""Templates of expressions and statements over values."""

from __future__ import annotations

_TORCH = (
    "relu sigmoid tanh sin cos erf expm1 square neg abs sign atan sinh cosh nan_to_num"
).split()
_F = "gelu silu softplus elu leaky_relu hardswish hardsigmoid hardtanh mish logsigmoid celu selu "
_F += "softsign tanhshrink hardshrink relu6 glu"
UNARY = (
    *(f"torch.{name}($a)" for name in _TORCH), *(f"F.{name}($a)" for name in _F.split()),
    "F.gelu($a, approximate='tanh')", "torch.exp($a.tanh())", "torch.log($a.abs() + 0.5)",
    "torch.log1p($a.abs())", "torch.rsqrt($a.square() + 1)", "torch.sqrt($a.abs() + 0.5)",
    "torch.reciprocal($a.square() + 1)", "$a.pow(2)", "$a ** 3", "$a.abs().add(0.5).pow(0.5)",
    "torch.pow(2.0, $a.tanh())", "$a - $a.detach().floor()", "$a + $a.detach().ceil()",
    "$a * $a.detach().round()", "torch.fmod($a, 0.7)", "torch.remainder($a, 0.7)",
    "$a.clamp(-0.7, 0.7)", "$a.clamp(min=0.1)", "$a.clamp(max=0.3)", "2 * $a - 1", "1.5 - $a",
    "torch.rsub($a, 2)", "$a / 3", "$a.mul($s)", "$a.clone()", "$a.contiguous()",
    "$a.detach() + $a * 0.5", "$a.to(torch.float64)", "$a.to('cpu')", "$a.double()",
    "$a.type_as($a)", "F.threshold($a, 0.1, 0.05)", "torch.clamp_min($a, 0.1)",
    "torch.clamp_max($a, 0.1)", "{nn.PReLU()}($a)", "{nn.PReLU($C)}($a)", "F.softplus($a) * $a",
    "torch.trunc($a.detach()) + $a", "$a.frac() + $a", "torch.erfc($a)", "torch.positive($a)",
    "torch.div($a, 0.3, rounding_mode='floor').detach() + $a", "$a.detach().floor_divide(0.3) + $a",
    "torch.special.expit($a)", "torch.logit($a.sigmoid())",
    "{nn.Sequential(nn.Linear($H, $W), nn.GELU(), nn.Linear($W, $H))}($a)",
)  # fmt: skip

BINARY = (
    *("$a + $b",) * 6, *("$a + $c",) * 2, *("$a * $b",) * 2, "$a - $b", "$a * $c", "$c * $a",
    "$c + $a", "$a * $b + $b", "($a + $b) * $a", "$a + $b + $b", "torch.maximum($a, $b)",
    "torch.minimum($a, $c)", "torch.atan2($a, $b.abs() + 0.5)", "$a / ($c.abs() + 0.5)",
    "torch.add($a, $c, alpha=0.5)", "torch.sub($a, $c, alpha=2)", "torch.lerp($a, $b, 0.3)",
    "torch.addcmul($a, $b, $c, value=0.5)", "torch.addcdiv($a, $b, $b.square() + 1)",
    "torch.where($a > $c, $a, $b)", "torch.where($a > 0.1, $a, 0.2 * $a)",
    "torch.where($a.gt(0), $a, 0.5)", "torch.where($a.lt(0), 0.5, $a)",
    "torch.where($a.lt(0), 0.5, 1.0).double() * $a", "torch.hypot($a, $b + 2)",
    "torch.rsub($a, $c)", "torch.logaddexp($a, $b)", "$a.sigmoid() * $b",
    "torch.pow($a.abs() + 0.5, $c.tanh())", "torch.fmod($a, $c.abs() + 0.6)",
    "torch.remainder($a, $c.detach().abs() + 0.6)", "F.silu($a) * $b", "$a.addcmul($c, $c)",
    "torch.dist($a, $b + 1)", "F.cosine_similarity($a, $b, dim=$d, eps=0.1)",
    "torch.cdist($a, $b + 1)", "torch.xlogy($a, $b.abs() + 0.5)", "$a * $a.detach().sign()",
    "sum([$a, $b, $a])", "torch.cross($a[..., :3], $b[..., :3], dim=-1)",
    "$a + {nn.Parameter(torch.randn($H) * 0.3)}", "$a * {nn.Parameter(torch.randn($rest) * 0.3)}",
    "$a + {nn.Parameter(torch.randn($rest) * 0.3)}",
    "$a + {nn.Parameter(torch.randn($L, $H) * 0.3)} + {nn.Parameter(torch.randn($H, "
    "$L) * 0.3)}.t()",
    "{nn.Parameter(torch.randn(4, 4) * 0.3)} + {nn.Parameter(torch.randn(4, 4) * 0.3)}.t() + $r",
    "{nn.Parameter(torch.randn(1))} * $a + $b", "{nn.Parameter(torch.tensor(0.7))} * $a",
    "$a.clamp(min=$c)", "torch.multiply($a, $c)", "torch.true_divide($a, $c.tanh() + 2)",
    "torch.lerp($a, $b, $c)", "$a.where($c > 0, 0.0)", "F.pairwise_distance($a, $b + 1)",
    "torch.cross($f[:, :3], $f.flip(1)[:, :3] + 1, dim=1)",
)  # fmt: skip

IN_PLACE = (
    "!$A.add_($c)", "!$A.mul_($c)", "!$A.sub_($c)", "!$A += $b", "!$A *= $s", "!$A.relu_()",
    "!$A.tanh_()", "!$A.sigmoid_()", "!$A.clamp_(-1, 1)", "!$A.mul_(0.5)", "!$A[:, 0] = $s",
    "!$A[:, $k:].mul_(0.5)", "!$A[:, 1:] = $b[:, :-1].clone()", "!$A[..., 0] += 0.3",
    "!$A.masked_fill_($A.detach() > 1, 0.0)", "!$A[$A.detach() > 0.5] = 0.1",
    "!$A.transpose(1, 2).mul_(0.5)", "!$A.transpose(1, 2).add_($b)", "!$A.copy_($b.clone())",
    "!$A.index_fill_(1, torch.tensor([0]), 0.1)", "!$A.zero_()", "!$A.fill_(0.3)",
    "!$A.add_($b, alpha=0.5)", "!$A.div_(2)", "!$A.neg_()", "!$A.exp_()", "!$A.sin_()",
    "!$A.addcmul_($b, $b)", "!$A.lerp_($b, 0.3)",
    "!$A.select($d, $n).zero_()", "!$A.narrow($d, 0, $half).copy_($b.narrow($d, 0, $half) * 1)",
    "!$A.diagonal(0, 1, 2).mul_(0.5)", "!$A.flatten(1).mul_(0.9)", "!$A.view(-1)[:3] = 0.1",
    "!NEW_v = $a.clone()\nNEW_v[:, 0] = $b[:, -1]",
    "!NEW_v = $a.clone()\nNEW_v[..., 1:] += $b[..., 1:]",
    "!NEW_v = torch.zeros_like($a)\nNEW_v[:, 1:] = $a[:, :-1]",
    "!NEW_v = torch.empty_like($a)\nNEW_v[:, ::2] = $a[:, 1::2]\nNEW_v[:, 1::2] = $a[:, ::2]",
    "!NEW_v = $a.new_zeros($shape)\nNEW_v.copy_($b)", "F.relu($A * 1, inplace=True)",
    "{nn.SiLU(inplace=True)}($a + 0)", "{nn.Dropout(0.3, inplace=True)}($a + 0)",
    "!NEW_v = $a * 1\nfor row in NEW_v.unbind(1):\n    row.mul_(0.5)",
    "!NEW_v = $f.sin()\nNEW_v[$f > 0] = 0.0\nNEW_v[$f[:, 0, 0] > 0.5] = 1.5",
    "!NEW_v = $f.sin()\nNEW_v[torch.tensor([3, 1, 0]), 1] = $f[:3, 0]",
    "!NEW_v = $m.clone()\nNEW_v &= $m.flip(1)\nNEW_v |= ids > 5\nNEW_v ^= True",
    "!NEW_v = $i.clone()\nNEW_v <<= 1\nNEW_v.clamp_(max=7)",
    "!NEW_v = $f.clone()\nNEW_v[$i.max() % $B] = NEW_v[torch.tensor(-1)] * 2\n"
    "NEW_v[:, $i.min() % $C] = NEW_v[:, torch.tensor(-1)] + NEW_v[0, 0]\n"
    "NEW_v[0, $i.max() % $C], NEW_v[$i.min() % $B, None] = 3.0, $f[:1]",
    "!NEW_v = $a.new_empty($shape).copy_($b)",
)  # fmt: skip

REDUCTIONS = (
    *(f"$a.{name}($d, keepdim=$yes)" for name in "sum mean amax amin logsumexp prod".split()),
    *(f"$a.{name}($d, keepdim=$yes)[0]" for name in "max min median".split()),
    *(f"$a.{name}()" for name in "sum mean max min median norm prod std var".split()),
    "$a.sum(($d, -1))", "$a.mean((1, 2))", "$a.sum(0)", "$a.mean(0)", "$a.sum(0, keepdim=True)",
    "$a.var($d, correction=0)", "$a.std($d, unbiased=False)",
    "torch.var_mean($a, $d, correction=0)", "torch.std_mean($a, $d, correction=0)",
    "$a.var($d, unbiased=False, keepdim=$yes)", "$a.norm(dim=$d)",
    "$a.norm(2, dim=$d, keepdim=$yes)", "torch.linalg.vector_norm($a, dim=$d)",
    "torch.linalg.vector_norm($a)", "$a - $a.mean($d, keepdim=True)",
    "$a / $a.sum($d, keepdim=True).abs().clamp_min(1)",
    "$a / $a.norm(dim=$d, keepdim=True).clamp_min(0.1)", "F.normalize($a, dim=$d, eps=0.1)",
    "$a * $a.softmax($d)", "$a.softmax($d)", "$a.log_softmax($d)", "F.softmin($a, $d)",
    "torch._softmax($a, $d, False)", "torch._log_softmax($a, $d, False)",
    "torch._safe_softmax($a, $d)", "torch.aminmax($a, dim=$d)", "$a.mode($d)[0]",
    "$a.kthvalue(1, $d)[0]", "$a.nansum($d)", "$a.nanmean($d)", "torch.norm($a)",
    "torch.trace($two)", "$two.diagonal().sum()", "$a.sum(1) * $c.detach().mean()",
    "$a * $b.mean()", "$a + $b.sum($d, keepdim=True)", "$a.flatten(1).max(1)[0]", "$a.std()",
    "torch.norm($a, 2)", "torch.norm($a, 2, $d)", "$a.norm(p=3)", "$a.mean().expand(4)",
    "$a.flatten().dot($b.flatten())", "torch.vdot($a.flatten(), $b.flatten())",
    "$a.sum_to_size($a[:1].shape)", "torch.std($a, [$d])", "$a.abs().add(0.1).prod($d)",
    "torch.var($a, [$d], unbiased=False)", "$a.nanmedian($d)[0]", "$a.nanmedian()",
    "torch.renorm($a, 2, $d, 0.5)", "torch.quantile($a, 0.5, dim=$d)", "torch.cov($two)",
    "torch.trapezoid($a, dim=$d)", "$two.T.corrcoef()", "torch.std_mean($a)",
    "torch.segment_reduce($a, 'sum', lengths=torch.tensor([1, "
    "$B - 1]))",
)  # fmt: skip

SCANS = (
    "$a.cumsum($d)", "$a.tanh().cumprod($d)", "$a.cummax($d)[0]", "$a.cummin($d)[0]",
    "$a.logcumsumexp($d)", "$a.sort($d)[0]", "$a.sort($d, descending=True)[0]",
    "torch.sort($a, stable=True, dim=$d)[0]", "$a.topk($half, $d)[0]", "$a.diff(dim=$d)",
    "$a.flip($d)", "$a.roll(1, $d)", "$a.roll((1, 2), (1, -1))", "$a.flip(1, -1)",
    "!NEW_v = $a[:, 0]\nfor t in range(1, $a.shape[1]):\n"
    "    NEW_v = torch.tanh(NEW_v + 0.5 * $a[:, t])",
    "!NEW_v, NEW_s = $f[:, 0], []\nfor t in range($C):\n"
    "    NEW_v = torch.tanh({nn.Linear($H, $H)}(NEW_v) + $f[:, t])\n"
    "    NEW_s.append(NEW_v)\nNEW_v = torch.stack(NEW_s, 1)",
    "!NEW_v, NEW_s = $f[:, 0], []\nfor t in range($C):\n"
    "    NEW_v = torch.tanh({nn.Linear(2 * $H, $H)}(torch.cat([NEW_v, $f[:, t]], "
    "-1)))\n    NEW_s.append(NEW_v)",
    "!NEW_v = torch.zeros_like($f[:, 0])\nfor t in range($C):\n    NEW_v = 0.9 * NEW_v + $f[:, t]",
    "!NEW_v = torch.zeros_like($f[:, 0])\nfor part in $f.unbind(1):\n"
    "    NEW_v = NEW_v * part.sigmoid() + part",
)  # fmt: skip

VIEWS = (
    *("$a.transpose($d, $e)",) * 3, "$a.mT", "$a.permute(*range(1, $a.dim()), 0)", "$two.t()",
    "$two.T", "$a.flatten(1)", "$a.flatten(0, 1)", "$a.reshape($B, -1)", "$a.view($B, -1)",
    "$a.unflatten($d, (2, -1))", "$a.unflatten($d, (-1, $half))", "$a.unsqueeze($d)",
    "$a.unsqueeze(1).squeeze(1)", "$a.squeeze()", "$a.unsqueeze(2).squeeze((2,))",
    "$a.select($d, $n)", "$a.narrow($d, 0, $half)", "$a[:, $n:]", "$a[..., ::2]", "$a[..., None]",
    "$a.chunk(2, $d)", "$a.chunk(2, $d)[1]", "$a.split($half, $d)",
    "$a.split(dim=$d, split_size=[1, $N - 1])", "torch.split($a, 2, -1)", "$a.unbind($d)",
    "torch.mul(*$a.chunk(2, $d))", "torch.cat($a.chunk(2, $d)[::-1], $d)",
    "$a.unsqueeze($d).expand(*$a.shape[:$d], 2, *$a.shape[$d:])",
    "$a.narrow($d, 0, 1).expand($shape)", "$a[:, :1].expand_as($a)", "$a.repeat_interleave(2, $d)",
    "$a.repeat(*[2 if k == $d else 1 for k in range($a.dim())])", "$a.tile((2,))",
    "$a.movedim($d, $e)", "$a.swapaxes($d, $e)", "$a.diagonal(0, 1, 2)", "$a.unfold($d, 2, 1)",
    "$a.unfold(1, 2, 2)", "torch.diag_embed($a)", "$a.tril()", "$a.triu(1)", "F.pad($a, (1, 1))",
    "F.pad($a, (1, 0, 0, 1), value=0.5)", "F.pad($a, (0, 0, 1, 0))",
    "F.pad($three, (1, 1), mode='reflect')", "F.pad($three, (1, 2), mode='replicate')",
    "F.pad($three, (1, 2), mode='circular')",
    "torch.constant_pad_nd($a, [1, 1], 0.3)", "$a.reshape(-1, *reversed($shape[1:]))",
    "$a.view_as($a)", "$a.ravel().view($shape)", "$a.rot90(1, (1, 2))", "torch.atleast_3d($a)",
    "$a.broadcast_to(2, *$a.shape)", "torch.unbind($a, 1)[0]", "$a.T if $a.dim() == 2 else $a.mT",
    "$a.slice_scatter($b.narrow($d, 0, 1), $d, 0, 1)", "$a.select_scatter($b.select($d, 0), $d, 0)",
    "$a.transpose(1, 2).contiguous().view($B, -1)", "$a.permute(0, 2, 1)",
    "$f.view($B, $L, 2, -1).transpose(1, 2)", "F.pixel_shuffle($g, 2)", "F.channel_shuffle($g, 2)",
    "torch.tensor_split($a, 2, $d)[0]", "torch.hsplit($a, 2)[0]", "$a.resolve_conj()",
    "torch.meshgrid($r.flatten()[:3], $r.flatten()[:2], indexing='ij')[0]",
    "$two.diagonal() + torch.diag($two)", "F.pad($g, (2, -1, 0, 1), mode='circular')",
    "F.pad($video[:, :, :2, :2], (4, 0, 1, 1, 0, 1), mode='circular')",
    "$a.repeat(2, 3, *[1] * $a.dim())",
    "F.pad($g, (1, 2, 0, 1), mode='reflect')",
    "F.pad($video[:, :, :2, :2], (1, 2, 0, 0, 1, 1), mode='replicate')",
)  # fmt: skip

JOINED = (
    *("torch.cat([$a, $b], $d)",) * 4, "torch.cat([$a, $a], $d)", "torch.stack([$a, $b], $d)",
    "torch.stack([$a, $b, $a]).sum(0)", "torch.cat([$a[:, 1:], $b[:, :1]], 1)",
    "torch.cat([$a, $a.mT], 1)", "torch.cat([$a.narrow($d, 0, 1), $b], $d)",
    "torch.stack([$a, $b], -1)", "torch.cat([c + c.flip(0) for c in $a.chunk(2, $d)], $d)",
    "torch.hstack([$a, $b])", "torch.vstack([$a, $b])", "torch.cat([$a, $b, $a * 2], -1)",
    "torch.stack([$a, $b]).unbind(0)[1] + $a", "torch.cat([$f, $f.mean(1, keepdim=True)], 1)",
    "torch.block_diag($two, $two)",
    "torch.cat([$a, {nn.Parameter(torch.randn(1, 1, $H) * 0.3)}.expand($B, -1, -1)], 1)",
    "torch.cat([{nn.Parameter(torch.randn(1, 2, $H) * 0.3)}.expand($B, -1, -1), $a], 1)[:, $k:]",
    "torch.outer($a.flatten()[:4], $b.flatten()[:3])",
    "torch.cartesian_prod($a.flatten()[:3], $a.flatten()[:2])",
    # Gradients of views of one memory.
    "($f + $f.mT) * $f", "$f + $f.flip(1) + $f.mT", "$f + $f.mT + $f.mT.reshape($shape)",
    "$f + $f[:, :1].expand($shape) + $f.mT", "torch.cat([$f, $f.mT], 1)[:, 2:6]",
    "torch.stack([$f, $f.mT, $f]).sum(0)", "$f + torch.cat([$f[:, 1:], $f[:, :1]], 1)",
    "$f + {nn.Parameter(torch.randn(4, 4) * 0.3)}.t() + $f.mT",
)  # fmt: skip

BOOLEANS = (
    "$a > $c", "$a >= 0.1", "$a < $c", "$a.le(0.2)", "$a == $b", "$a != 0", "$i == 3", "$i.ne($I)",
    "~$m", "$m & $m", "$m | $m.flip(1)", "$m ^ $m.roll(1, 1)", "$m.any(1)", "$m.all(-1)",
    "$m.any()", "$m.all()", "torch.isnan($a)", "torch.isinf($a)", "torch.logical_and($m, $m)",
    "torch.logical_or($m, ~$m)", "torch.logical_not($m)", "torch.logical_xor($m, $m.flip(1))",
    "torch.isin($i, torch.tensor([1, 3]))", "torch.any($m, dim=(0, 1))",
    "torch.all($m, dim=(0, 1))", "$i.gt(2)", "$i.lt($I.flip(1))",
    "torch.ones(4, 4, dtype=torch.bool).tril()", "$a.masked_fill($a.detach() < 0, 0.0)",
    "$a.masked_fill($a.detach() > $c.detach(), torch.tensor(0.3, dtype=torch.float64))",
    "torch.where($m[..., None], $f, $f.tanh())", "$f.masked_fill($m[..., None], 0.0)",
    "$f * $m[..., None]", "$f * $m.double()[..., None]", "$m.double().mean()",
    "$a * $m.any().double()", "$f.masked_scatter($m[..., None], $f.flip(1) * 2)",
    "$f.sum(1) / $m.sum(1, keepdim=True).clamp(min=1)", "torch.isfinite($a)", "$i.ge(2) & $i.le(5)",
    "$i.eq($I.roll(1, 1))", "$a.ne($b)", "$a.ge($b)", "$a.lt(0.3)", "$a.bool()",
    "torch.count_nonzero($m, dim=1)", "torch.count_nonzero($i)",
    "torch.count_nonzero($m, dim=(0, 1))",
)  # fmt: skip

INTEGERS = (
    "($i * 3 + 1) % 8", "$i % 4", "$i.clamp(max=3)", "$i.flip(1)", "$i.roll(1, 1)", "$i // 2",
    "$a.detach().argmax($d)", "$a.argmin($d)", "$a.detach().argsort($d)", "$a.topk(2, -1)[1]",
    "$i + torch.arange($H)", "torch.arange($L, device=$a.device).expand($B, -1)", "$i & 3",
    "$i | 1", "$i ^ 1", "~$i & 7", "$i << 1 & 7", "torch.bitwise_and($i, $I)",
    "torch.bitwise_or($i, $I)", "torch.bitwise_xor($i, $I)",
    "torch.bucketize($a.detach(), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64))",
    "$i.cumsum(1) % 8", "$i.max(1)[0]", "$m.long()", "$m.long().cumsum(1)",
    "torch.where($m, $i, 0)", "$a.detach().argmax()", "$a.detach().argmin()", "$i.sort(1)[0]",
    "F.one_hot($i, 8).double()", "F.one_hot($i % 4, 4).double() * 0.5", "{nn.Embedding(8, $W)}($i)",
    "{nn.Embedding(8, $W, padding_idx=0)}($i)",
    "F.embedding($i, {nn.Parameter(torch.randn(8, $W) * 0.3)})",
    "{nn.Parameter(torch.randn(8, $W))}[$i]", "$i.double() * 0.1", "torch.zeros_like($i)",
    "torch.full_like($i, 2)", "torch.ones_like($i)", "torch.remainder($i, $I + 1)",
    "$a.unflatten(0, (2, -1)).argmax(1)", "$a * $b.detach().histc(4, -2, 2).mean()",
    "torch.repeat_interleave($i, 2, 1)", "torch.floor_divide($i, 3)", "torch.maximum($i, $I)",
    "torch.stack([$i, $I])", "torch.cat([$i, $i], 1)", "$a.detach().max(-1)[1]",
    "torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64), $a.detach())",
    "torch.searchsorted($a.detach().sort(-1)[0], $b.detach())",
)  # fmt: skip

_WINDOW = "torch.hann_window(4, dtype=torch.float64)"
_STFT = f"torch.stft($f.flatten(1), 4, 2, window={_WINDOW}, return_complex=True)"
COMPLEX = (
    "torch.fft.rfft($a)", "torch.fft.fft($a)", "torch.fft.rfft($a, dim=$d)", "torch.fft.fft2($a)",
    "torch.fft.ifft($z)", "torch.fft.irfft($z)", "torch.fft.irfft($z, n=4)",
    "torch.fft.irfft(torch.fft.rfft($a), n=$H)", "$z.abs()", "$z.real", "$z.imag",
    "torch.view_as_real($z)", "torch.view_as_real($z)", "$z * $Z.conj()", "$z + $Z", "$z * 0.5",
    "$z - $Z", "torch.complex($a, $b)", "torch.complex($a, $c.expand_as($a))",
    "torch.polar($a.abs() + 0.1, $b)",
    "torch.view_as_complex($a.unflatten(-1, (-1, 2)).contiguous())", "$z.conj()",
    "($z * $z.conj()).real", "$z.sum(1)",
    "torch.einsum('...i,io->...o', $z, {nn.Parameter(torch.randn($H, $W, "
    "dtype=torch.complex128) * 0.3)})",
    "$z * {nn.Parameter(torch.randn($H, dtype=torch.complex128))}",
    "$z @ {nn.Parameter(torch.randn($H, $W, dtype=torch.complex128) * 0.3)}",
    "torch.cat([$z, $Z], -1)", "$z.transpose(1, 2)", "$z.mT",
    "torch.view_as_real($z * $Z).flatten(-2)", "$z.angle()", "torch.fft.rfft2($a)",
    "torch.fft.fftn($a, dim=($d, -1))", "$z.mean(-1)", "$z.conj().real", "$z.mH.imag",
    "torch.conj_physical($z)",
    "$z.flatten(1)", "$z / ($z.abs() + 1)", "torch.exp($z * 0.3)", "$a * $a.to(torch.complex128)",
    "torch.fft.fftshift($a, dim=$d)", "$z.square()", "torch.where($z.abs() > 0.5, $z, $Z * 0.1)",
    "torch.stack([$z, $Z]).sum(0)", "$z.unsqueeze(1)", "$z[..., 1:]", "$z[:, ::2]",
    "!NEW_v = $z.clone()\nNEW_v[:, 0] = $Z[:, -1]", "!NEW_v = $z * 1\nNEW_v[..., 0] *= 0.5",
    "!NEW_v = torch.zeros_like($z)\nNEW_v[..., :2] = $Z[..., :2] * 0.5",
    "!NEW_v = torch.zeros_like($z)\nNEW_v[..., :2] = torch.einsum('b...i,i->b...i', $Z[..., :2], "
    "{nn.Parameter(torch.randn(2, dtype=torch.complex128))})",
    "!NEW_v = torch.zeros_like($z)\nNEW_v[:, 1] = $Z[:, 0]\n"
    "NEW_v[:, ::2] += $Z[:, 1::2].conj()\nNEW_v[..., 1::3].copy_($Z[..., :1].real)\n"
    "NEW_v[:, 0, -1] = 0.5",
    f"{_STFT}.abs()", f"torch.view_as_real({_STFT})",
    f"torch.istft({_STFT} * 0.5, 4, 2, window={_WINDOW})",
)  # fmt: skip

PLACES = (
    "$f.gather(1, ($i % $C)[..., None].expand($shape))", "$f.gather(-1, ($i % $H)[..., None])",
    "torch.zeros_like($f).scatter_add(1, ($i % $C)[..., None].expand($shape), $f)",
    "$f.scatter(1, ($i % $C)[..., None].expand($shape), $f.flip(1))",
    "$f.scatter(2, ($i % $H)[..., None], 0.3)",
    "$f.scatter_reduce(1, ($i % $C)[..., None].expand($shape), $f, 'sum')",
    "$f.scatter_reduce(1, ($i % $C)[..., None].expand($shape), $f.flip(1), 'amax')",
    "$f[torch.arange($B), $i[:, 0] % $C]", "$f[:, [2, 0, 1]]",
    "$a.index_select($d, torch.tensor([0, 0]))", "$f.index_select(1, torch.tensor([2, 0, 1]))",
    "$f.index_add(1, torch.tensor([3, 0]), $f[:, :2])",
    "$f.index_copy(1, torch.tensor([1]), $f[:, :1])", "$f.index_fill(1, torch.tensor([1, 2]), 0.5)",
    "$f.index_fill(1, torch.tensor([1]), torch.tensor(0.5, dtype=torch.float64))",
    "$f.index_put((torch.arange($B), $i[:, 0] % $C), $f[:, 0])",
    "torch.index_put($f, ($m,), torch.tensor(0.2, dtype=torch.float64))",
    "$f[:, torch.tensor([0, 2])]", "$a.take_along_dim($a.detach().argsort($d), $d)",
    "$f.gather(-1, $f.detach().argmax(-1, keepdim=True))", "$f.mT @ F.one_hot($i, 8).double()",
    "{nn.Parameter(torch.randn(8, $W, $H) * 0.3)}[$i.flatten()] @ $f.flatten(0, 1)[..., None]",
    "torch.zeros(8, $H, dtype=torch.float64).index_add(0, $i.flatten(), $f.flatten(0, 1))",
    "torch.take($a, torch.tensor([0, 3]))", "$f[$i.max() % $B] + $f[:, $i.min() % $C, None]",
    "$f[$i.sum() % $B, torch.tensor(-1)] + $f[$i.max() % $B, [1, 2, 0, 0]]",
    "$f[:, torch.tensor([0, 2, 1])] * $f[torch.tensor([0, 2, 1]), torch.tensor([0, 2, 1])].sum()",
    "torch.zeros_like($f).index_add_(1, torch.tensor([3, 0]), $f[:, :2])",
    "!NEW_v = torch.zeros($B, $C, 8, dtype=torch.float64)\n"
    "NEW_v.scatter_(2, $i[..., None], 1.0)\nNEW_v = NEW_v * $f[..., :1]",
    "$f * torch.softmax({nn.Linear($H, 4)}($f), -1).topk(2, -1)[0].sum(-1, keepdim=True)",
)  # fmt: skip

_EYE = "torch.eye(4, dtype=torch.float64)"
_SPD = f"($f[:, :4, :4] @ $f[:, :4, :4].mT * 0.1 + 2 * {_EYE})"
MATRICES = (
    f"torch.linalg.inv({_SPD})", f"torch.linalg.cholesky({_SPD})", f"torch.linalg.det({_SPD})",
    f"torch.linalg.slogdet({_SPD})[1]", f"torch.linalg.solve({_SPD}, $f[:, :4])",
    f"torch.linalg.qr({_SPD})[1].abs()", "torch.linalg.matrix_exp($f[:, :4, :4].tanh() * 0.3)",
    f"torch.linalg.eigvalsh({_SPD} + torch.diag(torch.arange(4.0).double()))",
    f"torch.linalg.svdvals({_SPD} + torch.diag(torch.arange(4.0).double()))",
    f"torch.linalg.eigh({_SPD} + torch.diag(torch.arange(4.0).double()))[0]",
    "torch.linalg.cross($a[..., :3], $b[..., :3])", f"torch.linalg.matrix_norm({_SPD})",
    f"torch.logdet({_SPD})", "torch.cdist($f, $f + 1)",
    "torch.cdist($a, $b + 1, compute_mode='use_mm_for_euclid_dist')",
    f"torch.linalg.matrix_power({_SPD} * 0.3, 2)", "torch.pdist($a.flatten(1))",
    f"torch.cholesky_solve($f[:, :4], torch.linalg.cholesky({_SPD}))",
    f"torch.linalg.solve_triangular({_SPD}, $f[:, :4], upper=True)",
    f"torch.linalg.lu({_SPD})[2]", f"torch.linalg.pinv({_SPD}[..., :3])",
    "torch.linalg.householder_product($f[:, :4, :2].tanh(), $f[:, 0, :2].sigmoid())",
)  # fmt: skip

FACTORIES = (
    "$a + torch.zeros($H, dtype=torch.float64)", "$a * torch.ones($L, $H, dtype=torch.float64)",
    "$a + torch.full(($H,), 0.3, dtype=torch.float64)", "$a + $a.new_zeros($H)",
    "$a * $a.new_ones($H)", "$a + $a.new_full(($H,), 0.3)", "$a + torch.zeros_like($b)",
    "$a * torch.ones_like($b)", "$a + torch.full_like($b, 0.2)",
    "$a * torch.arange($H, dtype=torch.float64)",
    "$a + torch.linspace(-1, 1, $H, dtype=torch.float64)",
    "$a @ torch.eye($H, dtype=torch.float64)", "$a + torch.tensor([0.1] * $H, dtype=torch.float64)",
    "torch.zeros($B, $L, dtype=torch.float64) + $a.sum()", "$a + torch.empty_like($b).fill_(0.3)",
    "$a * torch.tril(torch.ones($L, $H, dtype=torch.float64))",
    "$a * torch.ones($shape, dtype=torch.float64).cumsum(1)",
    "$a + torch.sin(torch.arange($L, dtype=torch.float64))[:, None]",
    "$f * torch.linspace(0, 1, $L, dtype=torch.float64)[None, :, None]",
)  # fmt: skip

# Bags of rows: as rows of equal length, cut by offsets, weighted.
_ROWS = "torch.arange(0, $i.numel(), 4)"
BAGS = (
    *(f"{{nn.EmbeddingBag(8, $W, mode='{mode}')}}($i)" for mode in ("sum", "mean", "max")),
    "{nn.EmbeddingBag(8, $W, padding_idx=0)}($i)",
    f"{{nn.EmbeddingBag(8, $W)}}($i.flatten(), {_ROWS})",
    "{nn.EmbeddingBag(8, $W, scale_grad_by_freq=True)}($i)",
    f"F.embedding_bag($i.flatten(), {{nn.Parameter(torch.randn(8, $W))}}, {_ROWS}, mode='sum')",
    "F.embedding_bag($i, {nn.Parameter(torch.randn(8, $W))}, mode='sum', "
    "per_sample_weights=$i.double() * 0.1)",
    "F.embedding_bag($i, {nn.Parameter(torch.randn(8, $W))}, mode='sum', "
    "per_sample_weights={nn.Parameter(torch.rand(8))}[$i])",
    "{nn.EmbeddingBag(8, $W, mode='mean', padding_idx=-2)}($i)",
    "{nn.EmbeddingBag(8, $W, mode='max', padding_idx=3)}($i)",
    *(f"{{nn.EmbeddingBag(8, $W, mode='{mode}', padding_idx=3)}}($i.flatten(), "
      "torch.tensor([0, 2, 2, 7, 9, 12, 20, 28]))" for mode in ("sum", "mean", "max")),
    "{nn.EmbeddingBag(8, $W, mode='sum', include_last_offset=True)}($i.flatten(), "
    "torch.tensor([0, 2, 2, 7, 9, 12, 20, 28, 32]), "
    "per_sample_weights={nn.Parameter(torch.rand(8))}[$i.flatten()])",
)  # fmt: skip

# Derivatives that the loss is of, and functions over one row at a time.
_CUBE = "(lambda t: (t.sin() * t).sum())"
# Values, and functions of them whose derivatives have derivatives.
_SLOPES = (
    *(("$a", f"F.{name}($a)") for name in (
        "gelu relu softplus elu leaky_relu mish hardtanh selu celu hardswish logsigmoid silu"
    ).split()),
    ("$a", "$a.sigmoid()"), ("$a", "{nn.LayerNorm($H)}($a)"), ("$a", "F.rms_norm($a, ($H,))"),
    ("$a", "{nn.PReLU()}($a)"), ("$f", "F.scaled_dot_product_attention($f, $f, $f)"),
    ("$three", "{nn.Conv1d($C, $C, 2, stride=2, padding=1, groups=$C)}($three)"),
    ("$three", "{nn.ConvTranspose1d($C, $W, 3, stride=2, padding=1, output_padding=1)}($three)"),
    ("$three", "F.interpolate($three, scale_factor=2)"), ("$three", "F.max_pool1d($three, 2)"),
    ("$three", "F.instance_norm($three)"), ("$g", "{nn.GroupNorm(2, $C)}($g)"),
)  # fmt: skip
# Values, shapes of weights, and functions of both.
_OF_WEIGHTS = (
    ("$a", "$W, $H", "F.linear(a, w)"),
    ("$i", "8, $W", "F.embedding(a, w)"),
    ("$three", "4, $C, 3", "F.conv1d(a, w, padding=1)"),
    ("$three", "$C, 4, 2", "F.conv_transpose1d(a, w, stride=2)"),
)


def _after_descent(hole: str, shape: str, of: str) -> str:
    """The template of a function of a weight that descended the gradient of its square."""
    slope = f"torch.autograd.grad({of}.tanh().square().mean(), w, create_graph=True)[0]"
    weight = f"{{nn.Parameter(torch.randn({shape}) * 0.3)}}"
    return f"(lambda a, w: (lambda a, w: {of})(a, w - 0.1 * {slope}))({hole}, {weight})"


DERIVATIVES = (
    f"torch.autograd.grad({_CUBE}($a), $a, create_graph=True)[0]",
    "torch.autograd.grad({nn.Linear($H, $W)}($a).tanh().sum(), $a, create_graph=True)[0]",
    f"torch.func.grad({_CUBE})($a)", "torch.func.grad(lambda t: (t * t.mT).sum())($a)",
    "torch.func.vjp(torch.sin, $a)[1]($b)[0]", "torch.func.jvp(torch.tanh, ($a,), ($b,))[1]",
    "torch.vmap(lambda t: t * 2 - t.sum())($a)", "torch.vmap(torch.dot)($two, $two)",
    "torch.vmap(lambda t, u: t * u.softmax(0), (1, 1))($a, $b)",
    "torch.vmap({nn.Linear($H, $W)})($a)", f"torch.vmap(torch.func.grad({_CUBE}))($a)",
    *(f"torch.autograd.grad({of}.sin().sum(), {value}, create_graph=True)[0]"
      for value, of in _SLOPES),
    # Inputs that require gradients, and a derivative that is a constant.
    "torch.autograd.grad({nn.Linear(4, 4)}(x.requires_grad_()).tanh().sum(), x, "
    "create_graph=True)[0]",
    "!NEW_v = $a.detach().requires_grad_()\n"
    "NEW_v = -torch.autograd.grad(outputs={nn.Linear($H, $W)}(NEW_v).tanh().sum(), inputs=NEW_v, "
    "create_graph=True)[0]",
    "$a * torch.autograd.grad(($a * $a).sin().sum(), $a, retain_graph=True)[0]",
    # Second derivatives, and the loss after a step of gradient descent.
    "torch.autograd.grad(torch.autograd.grad(($a.sin() * $a).sum(), $a, create_graph=True)[0]"
    "[..., 0].sum(), $a, create_graph=True)[0]",
    *(_after_descent(*of) for of in _OF_WEIGHTS),
    "torch.vmap(F.linear, (None, 0))($three[0], {nn.Parameter(torch.randn(3, $W, $H) * 0.3)})",
)  # fmt: skip

# Functions with a derivative of their own, and values that pass no gradient.
FUNCTIONS = (
    "Twice.apply($a, $b)", "Twice.apply($a, $a)", "Cubed.apply($a)", "Twice.apply($a, $b) + $a",
    "Twice.apply($f, $f * 2) + $f.mT",
    "Twice.apply($f, {nn.Parameter(torch.randn(4, 4) * 0.3)}.expand($shape)) * 2 + $f",
    "checkpoint({nn.Linear($H, $W)}, $a, use_reentrant=False)",
    "checkpoint({nn.Sequential(nn.Linear($H, $W), nn.Tanh(), nn.Linear($W, $H))}, "
    "$a, use_reentrant=False) + $a",
    "checkpoint(torch.tanh, $a, use_reentrant=False)",
    "!with torch.no_grad():\n    NEW_v = $a * 2\nNEW_v = NEW_v + $a",
    "!with torch.no_grad():\n    NEW_v = {nn.Linear($H, $W)}($a)",
    "$a + ($a.detach().round() - $a).detach()",
    "!NEW_v = $a\nfor k in range(3):\n"
    "    NEW_v = NEW_v + 0.5 * NEW_v.transpose(1, 2) if NEW_v.dim() == 3 and "
    "NEW_v.shape[1] == NEW_v.shape[2] else NEW_v.tanh()",
)  # fmt: skip
