"""Templates of layers with weights or state."""

from __future__ import annotations

LAYERS = (
    *("{nn.Linear($H, $W)}($a)",) * 5, "{nn.Linear($H, $W, bias=False)}($a)",
    "F.linear($a, {nn.Parameter(torch.randn($W, $H) * 0.3)})",
    "F.linear($a, {nn.Parameter(torch.randn($W, $H) * 0.3)}, "
    "{nn.Parameter(torch.randn($W) * 0.3)})",
    "$a @ {nn.Parameter(torch.randn($H, $W) * 0.3)}",
    "{nn.Sequential(nn.Linear($H, $W), nn.ReLU(), nn.Linear($W, $W2))}($a)",
    "{nn.utils.parametrizations.weight_norm(nn.Linear($H, $W))}($a)",
    "{nn.Bilinear($H, $H, $W)}($a, $b)", "{nn.Linear($H, $H)}({nn.Linear($H, $H)}($a).relu()) + $a",
    "$a + {nn.Linear($H, $H)}($a)", "{nn.Linear($H, $W)}($a) + {nn.Linear($H, $W)}($b)",
    "torch.tanh({nn.Linear($H, $W)}($a.transpose(1, 2) if $a.shape[1] == $H else $a))",
    "F.linear($a, {nn.Parameter(torch.randn($H, $H) * 0.3)}.t())",
    "F.linear({nn.Linear($H, $W)}($a), {nn.Parameter(torch.randn($H, $W) * 0.3)})",
    "F.glu({nn.Linear($H, 2 * $W)}($a), -1)",
    "torch.mul(*{nn.Linear($H, 2 * $W)}($a).chunk(2, -1))",
    "F.bilinear($a, $b, {nn.Parameter(torch.randn(3, $H, $H) * 0.3)})", "{nn.Flatten()}($a)",
    "{nn.Identity()}($a) * 2", "{nn.Unflatten(1, (2, -1))}($a)", "{nn.Linear($H, 8)}($f)",
)  # fmt: skip

PRODUCTS = (
    "$a @ $a.mT / $H", "$a @ $b.mT / $H", "torch.bmm($three, $three.mT)",
    "torch.matmul($a, $a.transpose(-1, -2))", "torch.mm($two, $two.t())",
    "torch.addmm($two.sum(1, keepdim=True), $two, $two.t())",
    "torch.einsum('bsi,ij->bsj', $f, {nn.Parameter(torch.randn($H, $W) * 0.3)})",
    "torch.einsum('bsi,ijk->bsjk', $f, {nn.Parameter(torch.randn($H, 2, 3) * 0.3)})",
    "torch.einsum('bsi,sio->bso', $f, {nn.Parameter(torch.randn($L, $H, 4) * 0.3)})",
    "torch.einsum('bsi,so->boi', $f, {nn.Parameter(torch.randn($L, 4) * 0.3)})",
    "torch.einsum('bsi,bti->bst', $f, $f)", "torch.einsum('bsi->bi', $f)",
    "torch.einsum('bii->bi', $f)", "torch.einsum('...i,ij', $f, $f[0].T)",
    "torch.einsum('ii,ij->j', $f[0], $f[1])", "torch.einsum('b...,b...->...', $f, $f.sin())",
    "torch.einsum('bs...,bt...,su->b...tu', $f, $f, {nn.Parameter(torch.randn($L, 2) * 0.3)})",
    "torch.addmv($two[:, 0], $two, $two[0])",
    "F.linear($f, torch._weight_norm({nn.Parameter(torch.randn(4, $H))}, "
    "{nn.Parameter(torch.rand(4, 1))}, 0))",

    "torch.einsum('bsi,io->ob', $f, {nn.Parameter(torch.randn($H, 8) * 0.3)})",
    "torch.mv($two, {nn.Parameter(torch.randn($H))})", "torch.mv($f[0], $f[1, 0])",
    "$a @ {nn.Parameter(torch.randn($H))}",
    "torch.dot($a.flatten(), $b.flatten())",
    "torch.baddbmm($f.mean(1, keepdim=True).transpose(1, 2), $f.mT, $f)",
    "torch.tensordot($a, {nn.Parameter(torch.randn($H, $W) * 0.3)}, 1)",
    "torch.kron($two, $two[:1, :2])", "torch.inner($a, {nn.Parameter(torch.randn($W, $H) * 0.3)})",
    "torch.bmm($f, {nn.Parameter(torch.randn($H, $W) * 0.3)}.expand($B, -1, -1))",
    "torch.linalg.multi_dot([$two, $two.t(), $two])", "torch.addr($two, $two[:, 0], $two[0])",
    "torch.baddbmm({nn.Parameter(torch.randn(1, 1))}, $f, $f.mT)",
    "torch.einsum('bsi,bsi->bs', $f, $f)", "torch.chain_matmul($two, $two.t())",
    "{nn.Parameter(torch.randn(4, 4) * 0.3)} @ $f", "(($f @ $f.mT).softmax(-1) @ $f)",
)  # fmt: skip

_HEADS = "$f.unflatten(-1, (2, -1)).transpose(1, 2)"
_QKV = "*{nn.Linear($H, 24)}($f).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)"
_SDPA = "F.scaled_dot_product_attention"
ATTENTION = (
    f"{_SDPA}({_QKV}).transpose(1, 2).flatten(2)",
    f"{_SDPA}({_QKV}, is_causal=True).transpose(1, 2).flatten(2)",
    f"{_SDPA}({_HEADS}, {_HEADS}, {_HEADS})", f"{_SDPA}($f, $f, $f)",
    f"{_SDPA}(*(t.unflatten(-1, (2, -1)).transpose(1, 2) for t in {{nn.Linear($H, "
    f"24)}}($f).chunk(3, -1)))",
    f"{_SDPA}($f, $f, $f, dropout_p=0.3)",
    f"{_SDPA}($f, $f, $f, torch.ones($L, $L, dtype=torch.bool).tril())",
    f"{_SDPA}($f, $f, $f, {{nn.Parameter(torch.randn($L, $L) * 0.3)}})",
    f"{_SDPA}($f, $f, $f, $m[:, None, :] | torch.eye($L, dtype=torch.bool))",
    f"{_SDPA}({_QKV}, ($m[:, None, None] | torch.eye($L, dtype=torch.bool)))",
    f"{_SDPA}({{nn.Linear($H, 16)}}($f).unflatten(-1, (4, 4)).transpose(1, 2), "
    f"{{nn.Linear($H, 8)}}($f).unflatten(-1, (2, 4)).transpose(1, 2), {{nn.Linear($H, "
    f"8)}}($f).unflatten(-1, (2, 4)).transpose(1, 2), enable_gqa=True).transpose(1, "
    f"2).flatten(2)",
    "{nn.MultiheadAttention($H, 2, batch_first=True)}($f, $f, $f)[0]",
    "{nn.MultiheadAttention($H, 2, batch_first=True)}($f, $f, $f, need_weights=False)[0]",
    "{nn.TransformerEncoderLayer($H, 2, 8, 0.0, batch_first=True)}($f)",
    "{nn.TransformerEncoderLayer($H, 2, 8, 0.1, batch_first=True, norm_first=True)}($f)",
    "{nn.TransformerDecoderLayer($H, 2, 8, 0.0, batch_first=True)}($f, $f)",
    "{nn.TransformerEncoderLayer($H, 2, 8, 0.0, batch_first=True)}($f, "
    "is_causal=True, src_mask=nn.Transformer.generate_square_subsequent_mask($L, "
    "dtype=torch.float64))",
    "($f @ $f.mT / 2 + torch.full(($L, $L), -9.0, dtype=torch.float64).triu(1)).softmax(-1) @ $f",
)  # fmt: skip

NORMS = (
    "{nn.LayerNorm($H)}($a)", "{nn.LayerNorm($H, bias=False)}($a)", "{nn.LayerNorm(($L, $H))}($a)",
    "{nn.RMSNorm($H, eps=1e-5)}($a)", "F.layer_norm($a, ($H,))", "F.rms_norm($a, ($H,), eps=1e-5)",
    "{nn.BatchNorm1d($C)}($three)", "{nn.BatchNorm1d($C)}($two)",
    "{nn.BatchNorm1d($C, affine=False)}($three)", "{nn.BatchNorm2d($C)}($g)",
    "{nn.BatchNorm2d($C, track_running_stats=False)}($g)",
    "{nn.BatchNorm1d($C, momentum=None)}($three)", "{nn.BatchNorm3d($C)}($video)",
    "{nn.GroupNorm(2, $C)}($g)", "{nn.GroupNorm(1, $C)}($three)",
    "{nn.GroupNorm($C, $C, affine=False)}($g)", "{nn.InstanceNorm2d($C, affine=True)}($g)",
    "{nn.InstanceNorm1d($C)}($three)", "{nn.LocalResponseNorm(2)}($g)",
    "F.batch_norm($three, None, None, training=True)", "F.group_norm($g, 2)",
    "$a * torch.rsqrt($a.square().mean(-1, keepdim=True) + 1e-5)", "F.instance_norm($g)",
    "F.local_response_norm($three, 2)",
    "{nn.InstanceNorm2d($C, affine=True, track_running_stats=True)}($g)",
    "{nn.InstanceNorm1d($C, track_running_stats=True)}($three)",
)  # fmt: skip

CONVOLUTIONS = (
    "{nn.Conv1d($C, $W, 2)}($three)", "{nn.Conv1d($C, $W, 3, padding=1)}($three)",
    "{nn.Conv1d($C, $C, 2, groups=$C)}($three)", "{nn.Conv1d($C, $W, 3, padding='same')}($three)",
    "{nn.Conv1d($C, $W, 2, stride=2, bias=False)}($three)", "{nn.Conv2d($C, $W, 2)}($g)",
    "{nn.Conv2d($C, $W, 3, padding=1)}($g)", "{nn.Conv2d($C, $W, 2, stride=2)}($g)",
    "{nn.Conv2d($C, 2 * $C, 2, groups=$C)}($g)", "{nn.Conv2d($C, 4, 3, padding='same')}($g)",
    "{nn.Conv2d($C, 4, 2, padding='valid')}($g)", "{nn.Conv2d($C, $W, 1)}($g)",
    "{nn.Conv2d($C, 4, 2, dilation=2)}($g)",
    "{nn.Conv2d($C, 4, 3, padding=1, padding_mode='reflect')}($g)",
    "{nn.Conv2d($C, 4, 3, padding=1, padding_mode='circular')}($g)",
    "{nn.Conv3d($C, 2, 2)}($video)",
    "{nn.Conv1d($C, $W, 3, padding=2, padding_mode='circular')}($three)",
    "{nn.Conv2d($C, 4, 3, padding=(1, 2), padding_mode='circular')}($g)",
    "{nn.Conv3d($C, 2, 3, padding=1, padding_mode='circular')}($video)",
    "{nn.Conv2d($C, 2 * $C, (2, 3), (1, 2), 1, (2, 1), groups=2)}($g)",
    "{nn.ConvTranspose2d($C, 2, 3, 2, 1, 1, groups=2)}($g)",
    "{nn.ConvTranspose1d($C, 4, 2, 2, dilation=2, bias=False)}($three)",
    "{nn.Conv3d($C, 2, 3, padding='same')}($video)", "{nn.Conv3d($C, 2, 2, stride=2)}($video)",
    "{nn.ConvTranspose1d($C, $W, 2)}($three)", "{nn.ConvTranspose1d($C, $W, 2, stride=2)}($three)",
    "{nn.ConvTranspose2d($C, 3, 2)}($g)", "{nn.ConvTranspose2d($C, 2, 2, stride=2)}($g)",
    "{nn.ConvTranspose3d($C, 2, 2)}($video)",
    "torch.convolution($g, {nn.Parameter(torch.randn(4, $C, 2, 2) * 0.3)}, None, [1, "
    "1], [0, 0], [1, 1], False, [0, 0], 1)",
    "F.conv2d($g, {nn.Parameter(torch.randn(4, $C, 2, 2) * 0.3)})",
    "F.conv1d($three, {nn.Parameter(torch.randn(4, $C, 2) * 0.3)}, padding=1)",
    "F.conv_transpose2d($g, {nn.Parameter(torch.randn($C, 3, 2, 2) * 0.3)})",
    "F.conv1d(F.pad($three, (2, 0)), {nn.Parameter(torch.randn($C, 1, 3) * 0.3)}, groups=$C)",
)  # fmt: skip

_POOLED = tuple(
    f"F.{kind}_pool{n}d({hole}, 2, {stride})"
    for n, hole in ((1, "$three"), (2, "$g"), (3, "$video"))
    for kind in ("max", "avg")
    for stride in (1, 2)
)
_ADAPTIVE = tuple(
    f"F.adaptive_{kind}_pool{n}d({hole}, 2)"
    for n, hole in ((1, "$three"), (2, "$g"), (3, "$video"))
    for kind in ("max", "avg")
)
_RESIZED = tuple(
    f"F.interpolate({hole}, scale_factor={scale}, mode='{mode}')"
    for hole, scale, modes in (
        ("$three", "2", "nearest nearest-exact linear"),
        ("$g", "(1, 2)", "nearest nearest-exact bilinear bicubic"),
        ("$video", "(1, 0.5, 2)", "nearest nearest-exact trilinear"),
    )
    for mode in modes.split()
)
IMAGES = (
    *_POOLED, *_ADAPTIVE, *_RESIZED,
    "F.interpolate($g, size=(3, 3), mode='bilinear', antialias=True)",
    "F.interpolate($g, size=(3, 3), mode='bicubic', antialias=True)",
    "F.interpolate($g, size=(5, 3), mode='bilinear', align_corners=True)",
    "F.adaptive_avg_pool3d($video, 3)", "F.max_pool1d($three, 2, return_indices=True)[0]",
    "F.max_pool2d($g, 2, return_indices=True)[0]",
    "F.max_pool3d($video, 2, return_indices=True)[0]",
    "F.max_unpool2d(*F.max_pool2d($g, 2, return_indices=True), 2)",
    "F.max_unpool3d(*F.max_pool3d($video, 2, return_indices=True), 2)", "F.unfold($g, 2)",
    "F.fold(F.unfold($g, 2, stride=2) * 2, $g.shape[2:], 2, stride=2)",
    "F.grid_sample($g, $g.mean(1)[:, :2, :2, None].expand(-1, -1, -1, 2).tanh(), "
    "align_corners=False)",
    "F.grid_sample($g, F.affine_grid($f[:, :2, :3] * 0.3, ($B, 1, 3, 3), "
    "align_corners=False), align_corners=True)",
    "F.affine_grid($f[:, :2, :3], ($B, 1, 2, 2), align_corners=False)", "F.pixel_shuffle($g, 2)",
    "F.pixel_unshuffle($g, 2)", "$g.flatten(2).transpose(1, 2)", "$g.mean((2, 3))",
    "F.adaptive_max_pool1d($three, 2, return_indices=True)[0]",
    "F.adaptive_max_pool2d($g, 2, return_indices=True)[0]", "F.lp_pool2d($g.abs() + 0.1, 2, 2)",
    "F.adaptive_avg_pool2d($g, 1).flatten(1)", "F.pad($g, (1, 1, 1, 1), mode='reflect')",
    "F.affine_grid({nn.Linear($H, 12)}($f[:, 0]).view(-1, 3, 4), ($B, 1, 2, 2, 2), "
    "align_corners=False)",
)  # fmt: skip

RANDOM = (
    "F.dropout($a, $p)", "{nn.Dropout($p)}($a)", "F.dropout2d($g, 0.3)", "F.dropout1d($three, 0.3)",
    "F.alpha_dropout($a, 0.3, True)", "F.feature_alpha_dropout($g, 0.3, True)",
    "{nn.Dropout(0.1)}($a) + {nn.Dropout(0.1)}($b)", "$a + 0.1 * torch.rand_like($a)",
)  # fmt: skip

RECURRENT = (
    "{nn.RNN($H, 4, batch_first=True)}($f)[0]", "{nn.LSTM($H, 4, batch_first=True)}($f)[0]",
    "{nn.GRU($H, 4, batch_first=True)}($f)[0]", "{nn.LSTM($H, 3, 2, batch_first=True)}($f)[1][0]",
    "{nn.GRU($H, 4, batch_first=True, bidirectional=True)}($f)[0]",
    "{nn.LSTMCell($H, 4)}($f[:, 0])[0]", "{nn.RNNCell($H, 4)}($f[:, 0])",
    "{nn.GRUCell($H, 4)}($f[:, 0])",
)  # fmt: skip

# Buffers: read, or moved by a step.
STATE = (
    "$a + {torch.ones($H)}",
    "!{torch.zeros($H)}.mul_(0.9).add_($f.detach().mean((0, 1)), alpha=0.1)",
    "!{torch.zeros(1)}.add_(1)\nNEW_v = $a * 2",
    "!with torch.no_grad():\n    {torch.zeros($H)}.lerp_($f.mean((0, 1)), 0.1)",
    "!with torch.no_grad():\n    {torch.ones($H)}.copy_($f.amax((0, 1)))",
    "!{torch.zeros($H)}.add_($f.detach().sum((0, 1)))\nNEW_v = $f * 2", "$f - {torch.zeros($H)}",
)  # fmt: skip
