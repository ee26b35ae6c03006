"""Changes in ulps, coded on a GPU: the messages of :mod:`zcomm._kernels.ulps`, byte for byte.

The calls are queued on the current stream and wait for nothing. So a message's length is known on the device alone: it
is in the head, of which ``message_nbytes`` takes a copy on the host. And a refused message raises nothing: it clears a
flag on the device. The contracts: ``cpp/include/zcomm/cuda_kernels.h``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zcomm._kernels import native_calls as calls


def is_built() -> bool:
    """Whether the native module has these kernels."""
    return calls.module is not None and hasattr(calls.module, "cuda_ulps_encode")


def encode(new: Tensor, old: Tensor, message: Tensor) -> None:
    """Write the change from ``old`` to ``new``, both [n], bf16 or fp16, to uint8 ``message`` [max_message_nbytes(n)].

    All are contiguous and on one device; ``message`` is aligned to 4 bytes. Cost: about as much workspace as
    ``new``, and eight launches.
    """
    numel, stream = new.numel(), torch.cuda.current_stream(new.device)
    workspace = torch.empty(calls.module.cuda_ulps_encode_workspace_nbytes(numel), dtype=torch.uint8, device=new.device)
    arrays = new.data_ptr(), old.data_ptr(), numel, message.data_ptr()
    with torch.cuda.device(new.device):
        calls.module.cuda_ulps_encode(*arrays, workspace.data_ptr(), stream.cuda_stream)


def decode(message: Tensor, values: Tensor, is_valid: Tensor) -> None:
    """Replace the old ``values`` [n] by the new ones. int32 ``is_valid`` [1] is 1; it becomes 0 for a refused message.

    Cost: a byte of workspace for each element, and four launches.
    """
    stream = torch.cuda.current_stream(values.device)
    nbytes = calls.module.cuda_ulps_decode_workspace_nbytes(values.numel())
    workspace = torch.empty(nbytes, dtype=torch.uint8, device=values.device)
    arrays = message.data_ptr(), message.numel(), values.data_ptr(), values.numel()
    with torch.cuda.device(values.device):
        calls.module.cuda_ulps_decode(*arrays, workspace.data_ptr(), is_valid.data_ptr(), stream.cuda_stream)
