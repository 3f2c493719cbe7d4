"""Replaces forward passes of norms with running statistics that `torch.export` cannot trace.

momentum=None        torch reads the count of batches as a Python number; here it stays a tensor
instance norms       the operator updates the statistics where the trace cannot see it; here they
                     are computed beside it
SyncBatchNorm        one process sees the whole batch, so it is a plain batch norm
"""

from __future__ import annotations

from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


def make_norm_traceable(module: nn.Module) -> None:
    """Give `module` an equivalent forward pass if its own cannot be traced."""
    if isinstance(module, _BatchNorm) and module.track_running_stats and module.momentum is None:
        module.forward = MethodType(_cumulative_batch_norm, module)  # type: ignore[method-assign]
    elif isinstance(module, nn.SyncBatchNorm):
        module.forward = MethodType(_BatchNorm.forward, module)  # type: ignore[method-assign]
    elif isinstance(module, _InstanceNorm) and module.track_running_stats:
        module._apply_instance_norm = MethodType(_tracking_instance_norm, module)  # type: ignore[method-assign]


def _cumulative_batch_norm(module: _BatchNorm, x: Tensor) -> Tensor:
    """Batch norm whose running statistics are means over all batches: old + (batch - old) / n.

    With momentum 1, the operator writes the statistics of the batch into `found`.
    """
    mean, var, count = module.running_mean, module.running_var, module.num_batches_tracked
    assert mean is not None and var is not None and count is not None
    if not module.training:
        return F.batch_norm(x, mean, var, module.weight, module.bias, eps=module.eps)
    module._check_input_dim(x)
    found = torch.zeros_like(mean), torch.zeros_like(var)
    out = F.batch_norm(x, *found, module.weight, module.bias, True, 1.0, module.eps)
    count.add_(1)
    for running, of_batch in zip((mean, var), found, strict=True):
        running.add_((of_batch - running) / count)
    return out


def _tracking_instance_norm(module: _InstanceNorm, x: Tensor) -> Tensor:
    """Instance norm of `x` [rows, channels, ...]; running statistics take the mean over rows."""
    mean, var, momentum = module.running_mean, module.running_var, module.momentum or 0.0
    assert mean is not None and var is not None
    if module.training:
        each = x.detach().flatten(2).to(mean.dtype)
        mean.lerp_(each.mean(2).mean(0), momentum)
        var.lerp_(each.var(2).mean(0), momentum)
        mean = var = None
    weight, bias, own = module.weight, module.bias, module.training
    return F.instance_norm(x, mean, var, weight, bias, own, momentum, module.eps)
