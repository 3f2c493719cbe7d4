"""What libraries hold on a device beside the tensors of a program.

    cuBLAS               a workspace for each thread that launches matmuls, forward's and
                         backward's: 32 MiB since Hopper, else 8 MiB + 128 KiB, or what
                         CUBLAS_WORKSPACE_CONFIG says (torch, ATen/cuda/CublasHandlePool.cpp,
                         `parseChosenWorkspaceSize`; older versions give Blackwell 8, too);
                         hipBLAS has 128 MiB on MI300
    Transformer Engine   32 MiB since Hopper, else 4; as much again for each of four streams of
                         grouped matmuls (pytorch/cpp_extensions/gemm.py,
                         `get_cublas_workspace_size_bytes`)

torch's allocator counts these among allocated bytes.
"""

from __future__ import annotations

_MIB = 2**20
_WIDE_BYTES, _NARROW_BYTES = 32 * _MIB, 8 * _MIB + 128 * 2**10
_AMD_BYTES = 128 * _MIB
_ENGINE_NARROW_BYTES = 4 * _MIB
_N_THREADS, _N_STREAMS = 2, 4
_SINCE_HOPPER = ("h100", "h200", "b200", "gb200", "gb300", "b300", "rtx-50")


def workspace_bytes(
    device: str, *, has_engine: bool = False, is_grouped: bool = False, is_wide: bool = False
) -> float:
    """Bytes of workspaces on a device of this profile name.

    has_engine   layers are Transformer Engine's
    is_grouped   it multiplies the rows of several experts at once
    is_wide      CUBLAS_WORKSPACE_CONFIG=:4096:8
    """
    is_new = device.startswith(_SINCE_HOPPER)
    if device.startswith("mi300"):
        return float(_N_THREADS * _AMD_BYTES)
    each = _WIDE_BYTES if is_new or is_wide else _NARROW_BYTES
    engine = _WIDE_BYTES if is_new else _ENGINE_NARROW_BYTES
    n_engine = has_engine * (1 + _N_STREAMS * is_grouped)
    return float(_N_THREADS * each + n_engine * engine)
