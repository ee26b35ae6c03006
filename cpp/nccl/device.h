#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "zcomm/arrays.h"
#include "zcomm/cuda_kernels.h"
#include "zcomm/message_layout.h"

// Interfaces to a GPU and to NCCL, for the pipeline. Implementations:
//
//   Device, Kernels   cuda_device.cc on a GPU; host_device.cc in host memory, for the emulated NCCL
//   Transport         nccl_transport.cc over NCCL; single_rank.h for a hop of one rank
//   all of them       cpp/tests/fake_gpu.h: its streams run in any order that events allow, which shows a missing event
//
// Calls queue work on streams and return before it is done. A call that fails throws std::runtime_error.

namespace zcomm::nccl {

using Stream = void*;  // cudaStream_t
using Event = void*;   // cudaEvent_t

// Streams, events and memory of one GPU.
class Device {
 public:
  virtual ~Device() = default;

  // A stream of high priority: where the GPU must choose, communication goes before computation, which other ranks do
  // not wait for.
  virtual Stream CreateStream() = 0;
  virtual void DestroyStream(Stream stream) noexcept = 0;
  virtual Event CreateEvent() = 0;
  virtual void DestroyEvent(Event event) noexcept = 0;

  // The event now stands for everything queued on `stream` so far.
  virtual void Record(Event event, Stream stream) = 0;
  // Work queued on `stream` from now on waits for what `event` stands for now. Does not block the host.
  virtual void Wait(Stream stream, Event event) = 0;
  // Whether the work that the event stands for is complete. The event must not have been recorded during a capture.
  // Do not call this, Allocate or Free on a thread that is capturing: CUDA refuses them and invalidates the capture.
  virtual bool IsDone(Event event) = 0;
  // Makes this GPU the current one of the calling thread.
  virtual void MakeCurrent() {}
  // Whether work on `stream` is being captured into a graph.
  virtual bool IsCapturing(Stream stream) = 0;

  virtual void* Allocate(std::size_t nbytes) = 0;
  // Waits until no queued work can use `data`.
  virtual void Free(void* data) noexcept = 0;
  virtual void Copy(void* to, const void* from, std::size_t nbytes, Stream stream) = 0;
};

// The operations of quantize.h, decode.h and reduce.h, queued on a stream; the same bits. `is_valid` (an int32 in
// device memory, or null) becomes 0 if a message has the wrong hash. The trailers of `expected` messages, which have
// the output's layout, are zeroed; so are those of DecodeSumRequantize's output if it refuses an input message. See
// cuda::Expected and cuda::DecodeSumRequantize for why.
using cuda::Expected;
class Kernels {
 public:
  virtual ~Kernels() = default;

  virtual void Quantize(const MessageLayout& layout, const ConstRows& input, const MutableMessages& output,
                        const Expected& expected, Stream stream) = 0;
  virtual void Decode(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output,
                      std::int32_t* is_valid, Stream stream) = 0;
  virtual void DecodeSum(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output,
                         float divisor, std::int32_t* is_valid, Stream stream) = 0;
  virtual void DecodeSumRequantize(const MessageLayout& layout, const ConstMessages& input,
                                   const MessageLayout& out_layout, const MutableMessages& output,
                                   const Expected& expected, std::int32_t* is_valid, Stream stream) = 0;
};

// Equal parts to or from every rank of a hop: part i of repeat r is at data + r * step_nbytes + i * stride_nbytes.
struct Parts {
  std::uint8_t* data;
  std::size_t stride_nbytes;
  std::size_t step_nbytes;
};

// The exchanges among the ranks of one hop. All ranks must make the same calls in the same order: NCCL matches calls by
// order alone, so that a difference is a deadlock, or bytes in the wrong buffer.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::size_t size() const = 0;
  virtual std::size_t rank() const = 0;

  // Copies `send` [nbytes] of rank i to receive + i * stride_nbytes on every rank. `send` may be this rank's own place
  // in `receive`.
  virtual void Gather(const void* send, void* receive, std::size_t stride_nbytes, std::size_t nbytes,
                      Stream stream) = 0;
  // Sends part i of `send` to rank i, and receives part i of `receive` from rank i; `repeats` of these at once.
  virtual void Exchange(const Parts& send, const Parts& receive, std::size_t nbytes, std::size_t repeats,
                        Stream stream) = 0;

  // The error that NCCL has found since the last call, on this rank or another; empty if none.
  virtual std::string AsyncError() = 0;
  // Ends all exchanges, in flight or queued; what they have received is undefined. Only the destructor may be called
  // afterwards. May be called from another thread while a call hangs, which then fails.
  virtual void Abort() noexcept = 0;
  // Registers `data`, so that the network reads and writes it directly. Null if that is not supported. Deregister
  // before `data` is freed: the network would otherwise write to memory of another owner.
  virtual void* Register(void* data, std::size_t nbytes) = 0;
  virtual void Deregister(void* registration) noexcept = 0;
};

}  // namespace zcomm::nccl
