"""Native CPU kernels of the wire formats (C++). The contracts stand in ``cpp/include/zcomm/*.h``.

Codec ids: the numbers of ``CODECS`` in _formats/formats.py. ``is_rotated``: whole blocks are rotated.
``draw``: seed, tensor, step, hop, rank, first of a ``Draw`` (_formats/philox.py), for stochastic rounding.
dtype ids: 0 float32, 1 bfloat16, 2 float16. Addresses (``*_ptr``) are ints. Strides of arrays count elements, strides
of messages bytes. The calls release the GIL, may run at the same time, and raise ValueError on bad arguments and on a
message whose trailer does not carry ``layout_hash``.
"""

from typing import TypedDict

Draw = tuple[int, int, int, int, int, int]

CODECS: dict[str, int]
"""Names and ids of the codecs that the kernels have."""
FILE_ALIGNMENT: int

def checked_file_nbytes(nbytes: int) -> int:
    """Bytes of a checked file with so many of data."""

class FileQueue:
    """Reads and writes files past the page cache; ``cpp/include/zcomm/file_queue.h``.

    OSError, with errno and path, when the operating system refuses something: at :meth:`wait` for a transfer.
    """

    def __init__(self, num_requests: int, request_nbytes: int, may_use_ring: bool = True) -> None: ...
    @property
    def engine(self) -> str:
        """``"io_uring"`` or ``"threads"``."""

    def create(self, path: str, nbytes: int, is_checked: bool = False) -> int:
        """Create a file with its space reserved; with ``is_checked``, one that carries checksums of its pages."""

    def open(self, path: str, is_checked: bool = False) -> int: ...
    def size(self, file: int) -> int: ...
    def sync(self, file: int) -> None: ...
    def close(self, file: int) -> None: ...
    def read(self, file: int, offset: int, ptr: int, nbytes: int) -> int:
        """Begin a transfer and return its ticket; all numbers are multiples of ``FILE_ALIGNMENT``."""

    def write(self, file: int, offset: int, ptr: int, nbytes: int) -> int:
        """As :meth:`read`."""

    def is_done(self, ticket: int) -> bool: ...
    def wait(self, ticket: int) -> None:
        """Return when the transfer has ended."""

def ulps_encode(new_ptr: int, old_ptr: int, numel: int, message_ptr: int, message_nbytes: int) -> int:
    """Write the change from old to new 16-bit values as a message; the bytes used: ``cpp/include/zcomm/ulps.h``."""

def ulps_decode(message_ptr: int, message_nbytes: int, values_ptr: int, numel: int) -> None:
    """Replace old values by new ones."""

def ulps_message_nbytes(head_ptr: int, head_nbytes: int) -> int:
    """The length of the message with this head."""

class NcclLibrary:
    """An NCCL that was found and checked; ``cpp/nccl/nccl_library.h``."""

    @property
    def path(self) -> str: ...
    @property
    def version(self) -> str:
        """As in ``2.29.7``."""

    @property
    def can_register(self) -> bool:
        """Whether it allocates and registers buffers."""

    @property
    def is_emulated(self) -> bool:
        """Whether it stands for NCCL in memory of the host; ``cpp/emulated``."""

class HostEvent:
    """What was queued on a stream of the host when it was recorded; ``cpp/nccl/host_stream.h``."""

    def is_done(self) -> bool: ...
    def wait(self) -> None: ...

class HostStream:
    """A stream whose work is done by a thread of its own, for the emulated NCCL."""

    @property
    def address(self) -> int:
        """As calls of the communicator take it."""

    def record(self) -> HostEvent: ...

def load_nccl(path: str, candidates: list[str]) -> NcclLibrary:
    """Load NCCL from ``path`` alone, or else from the first place that has one.

    RuntimeError: there is none, or not the one needed; with every reason.
    """

class BuildInfo(TypedDict):
    """What the binary was built from."""

    version: str
    compiler: str
    isa_levels: list[str]
    cuda: str
    """Version of the compiler and architectures; empty in builds without CUDA."""

def quantize(
    codec: int,
    block: int,
    is_rotated: bool,
    num_messages: int,
    num_segments: int,
    segment_numel: int,
    x_dtype: int,
    x_ptr: int,
    message_stride: int,
    segment_stride: int,
    out_ptr: int,
    out_stride_bytes: int,
    layout_hash: int,
    draw: Draw | None,
    num_threads: int,
) -> None:
    """Write messages from rows: message i, segment s from x[i * message_stride + s * segment_stride + ...]."""

def quantize_with_residual(
    codec: int,
    block: int,
    is_rotated: bool,
    num_messages: int,
    num_segments: int,
    segment_numel: int,
    x_dtype: int,
    x_ptr: int,
    message_stride: int,
    segment_stride: int,
    out_ptr: int,
    out_stride_bytes: int,
    layout_hash: int,
    draw: Draw | None,
    residual: Residual,
    num_threads: int,
) -> None:
    """As quantize, of rows and their residual, which is renewed; ``cpp/include/zcomm/feedback.h``."""

def decode_sum_requantize_with_residual(
    codec: int,
    block: int,
    is_rotated: bool,
    num_messages: int,
    num_segments: int,
    segment_numel: int,
    in_ptr: int,
    in_stride_bytes: int,
    layout_hash: int,
    out_codec: int,
    out_block: int,
    out_is_rotated: bool,
    out_ptr: int,
    out_stride_bytes: int,
    out_layout_hash: int,
    draw: Draw | None,
    residual: Residual,
    num_threads: int,
) -> None:
    """As decode_sum_requantize, of sums and their residual, which is renewed."""

def quantize_difference(
    codec: int,
    block: int,
    is_rotated: bool,
    num_messages: int,
    num_segments: int,
    segment_numel: int,
    x_dtype: int,
    x_ptr: int,
    held_dtype: int,
    held_ptr: int,
    message_stride: int,
    segment_stride: int,
    out_ptr: int,
    out_stride_bytes: int,
    layout_hash: int,
    draw: Draw | None,
    num_threads: int,
) -> None:
    """As quantize, of x - held, both with the same strides; ``cpp/include/zcomm/difference.h``."""

def decode_add(
    codec: int,
    block: int,
    is_rotated: bool,
    num_messages: int,
    num_segments: int,
    segment_numel: int,
    in_ptr: int,
    in_stride_bytes: int,
    layout_hash: int,
    out_dtype: int,
    out_ptr: int,
    message_stride: int,
    segment_stride: int,
    num_threads: int,
) -> None:
    """Add decoded messages to rows, in float32."""

def decode(
    codec: int,
    block: int,
    is_rotated: bool,
    num_messages: int,
    num_segments: int,
    segment_numel: int,
    in_ptr: int,
    in_stride_bytes: int,
    layout_hash: int,
    out_dtype: int,
    out_ptr: int,
    message_stride: int,
    segment_stride: int,
    num_threads: int,
) -> None:
    """Decode messages into rows, clamped to the finite range of the output dtype (block codecs)."""

def decode_sum(
    codec: int,
    block: int,
    is_rotated: bool,
    num_messages: int,
    num_segments: int,
    segment_numel: int,
    in_ptr: int,
    in_stride_bytes: int,
    layout_hash: int,
    out_dtype: int,
    out_ptr: int,
    segment_stride: int,
    divisor: float,
    num_threads: int,
) -> None:
    """out[s * segment_stride + e] = (d_0 + d_1 + ...) / divisor, in message order, in float32."""

def decode_sum_requantize(
    codec: int,
    block: int,
    is_rotated: bool,
    num_messages: int,
    num_segments: int,
    segment_numel: int,
    in_ptr: int,
    in_stride_bytes: int,
    layout_hash: int,
    out_codec: int,
    out_block: int,
    out_is_rotated: bool,
    out_ptr: int,
    out_stride_bytes: int,
    out_layout_hash: int,
    draw: Draw | None,
    num_threads: int,
) -> None:
    """Sum the messages; segment s of the sum becomes message s, of one segment."""

Factors = tuple[float, float, float, float, float, float, float, float, float, float]

def optimizer_step(
    rule: int,
    factors: Factors,
    numel: int,
    param_ptr: int,
    grad: tuple[int, int],
    moment1_ptr: int,
    moment2_ptr: int,
    moment_dtype: int,
    largest_ptr: int,
    out: tuple[int, int],
    draw: Draw | None,
    num_threads: int,
) -> None:
    """Move a flat shard by one step of rule 0 Adam, 1 AdamW, 2 Adagrad, 3 Lion; 4 has Adam's memory traffic.

    ``factors``: grad_factor, weight_decay, keep, rate, beta1, mix1, beta2, mix2, eps, inverse_root. ``grad``, ``out``:
    address and dtype id. Address 0: the rule has no such array.
    """

# The operations on a GPU, in builds with CUDA: ``cpp/include/zcomm/cuda_kernels.h``. Addresses are of the current
# device. ``is_valid_ptr``: an int32 that a message of another hash sets to 0. ``stream``: a cudaStream_t.
# ``held``: dtype id and address. ``residual``: addresses of codes and scales, their strides in elements, beta.

Residual = tuple[int, int, int, int, float]

def cuda_ulps_encode_workspace_nbytes(numel: int) -> int:
    """Of :func:`cuda_ulps_encode`."""

def cuda_ulps_decode_workspace_nbytes(numel: int) -> int:
    """Of :func:`cuda_ulps_decode`."""

def cuda_ulps_encode(new_ptr: int, old_ptr: int, numel: int, message_ptr: int, workspace_ptr: int, stream: int) -> None:
    """As :func:`ulps_encode`, on a GPU: the length is in the message's head."""

def cuda_ulps_decode(
    message_ptr: int,
    message_nbytes: int,
    values_ptr: int,
    numel: int,
    workspace_ptr: int,
    is_valid_ptr: int,
    stream: int,
) -> None:
    """As :func:`ulps_decode`, on a GPU: ``is_valid`` is 1, and becomes 0 if the message is refused."""

def cuda_quantize(
    codec: int,
    block: int,
    is_rotated: bool,
    num_messages: int,
    num_segments: int,
    segment_numel: int,
    x_dtype: int,
    x_ptr: int,
    message_stride: int,
    segment_stride: int,
    out_ptr: int,
    out_stride_bytes: int,
    layout_hash: int,
    held: tuple[int, int] | None,
    residual: Residual | None,
    stream: int,
) -> None:
    """Encode; of x - held, or with a residual (N10)."""

def cuda_decode(
    codec: int,
    block: int,
    is_rotated: bool,
    num_messages: int,
    num_segments: int,
    segment_numel: int,
    in_ptr: int,
    in_stride_bytes: int,
    layout_hash: int,
    out_dtype: int,
    out_ptr: int,
    message_stride: int,
    segment_stride: int,
    is_added: bool,
    is_valid_ptr: int,
    stream: int,
) -> None:
    """Decode, or add to the array."""

def cuda_decode_sum(
    codec: int,
    block: int,
    is_rotated: bool,
    num_messages: int,
    num_segments: int,
    segment_numel: int,
    in_ptr: int,
    in_stride_bytes: int,
    layout_hash: int,
    out_dtype: int,
    out_ptr: int,
    segment_stride: int,
    divisor: float,
    is_valid_ptr: int,
    stream: int,
) -> None:
    """Sum the messages."""

def cuda_decode_sum_requantize(
    codec: int,
    block: int,
    is_rotated: bool,
    num_messages: int,
    num_segments: int,
    segment_numel: int,
    in_ptr: int,
    in_stride_bytes: int,
    layout_hash: int,
    out_codec: int,
    out_block: int,
    out_is_rotated: bool,
    out_ptr: int,
    out_stride_bytes: int,
    out_layout_hash: int,
    residual: Residual | None,
    is_valid_ptr: int,
    stream: int,
) -> None:
    """Sum the messages; segment s of the sum becomes message s, of one segment."""

def message_nbytes(codec: int, block: int, is_rotated: bool, num_segments: int, segment_numel: int) -> int:
    """Bytes of one message."""

def isa() -> str:
    """The level the kernels run at: avx512, avx2, baseline or neon; the environment's ZCOMM_ISA caps it."""

def build_info() -> BuildInfo:
    """Version, compiler, ISA levels in the binary, and whether it has CUDA code."""
