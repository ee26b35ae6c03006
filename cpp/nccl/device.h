#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "zcomm/arrays.h"
#include "zcomm/cuda_kernels.h"
#include "zcomm/message_layout.h"

// What the pipeline needs of a GPU and of NCCL, as interfaces: cuda_device.cc and nccl_transport.cc are the real ones,
// tests/fake_gpu.h one whose streams run in any order that events allow. Work is queued on streams and done later; a
// call that fails throws std::runtime_error.

namespace zcomm::nccl {

using Stream = void*;  // cudaStream_t
using Event = void*;   // cudaEvent_t

// Streams, events and memory of one GPU.
class Device {
 public:
  virtual ~Device() = default;

  // Its work goes before that of other streams where the GPU has to choose.
  virtual Stream CreateStream() = 0;
  virtual void DestroyStream(Stream stream) noexcept = 0;
  virtual Event CreateEvent() = 0;
  virtual void DestroyEvent(Event event) noexcept = 0;

  // The event now stands for all that is queued on `stream`.
  virtual void Record(Event event, Stream stream) = 0;
  // What is queued on `stream` from here on waits for what `event` stands for now.
  virtual void Wait(Stream stream, Event event) = 0;
  // Whether what the event stands for has been done; not for an event recorded during a capture. Not to be called on a
  // thread that captures, as Allocate and Free are not: CUDA refuses them there, and the capture is lost.
  virtual bool IsDone(Event event) = 0;
  // For the calling thread.
  virtual void MakeCurrent() {}
  // Whether work on `stream` is being captured into a graph.
  virtual bool IsCapturing(Stream stream) = 0;

  virtual void* Allocate(std::size_t nbytes) = 0;
  // Waits for the device.
  virtual void Free(void* data) noexcept = 0;
  virtual void Copy(void* to, const void* from, std::size_t nbytes, Stream stream) = 0;
};

// The operations of quantize.h, decode.h and reduce.h, queued on a stream; the same bits. `is_valid`, an int32 in
// device memory or null, becomes 0 where a message carries another hash than it should. `expected` messages, of the
// output's layout, lose their trailers; so does the output of DecodeSumRequantize where it refuses a message.
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

// Equal parts for and from every rank of a hop. Part i of a repeat lies i strides from its first byte, repeat r begins
// r steps after the first.
struct Parts {
  std::uint8_t* data;
  std::size_t stride_nbytes;
  std::size_t step_nbytes;
};

// The exchanges among the ranks of one hop. All ranks make the same calls in the same order.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::size_t size() const = 0;
  virtual std::size_t rank() const = 0;

  // `send`, `nbytes` long, of rank i to receive + i * stride_nbytes on every rank; it may be its own place there.
  virtual void Gather(const void* send, void* receive, std::size_t stride_nbytes, std::size_t nbytes,
                      Stream stream) = 0;
  // Part i of `send` to rank i; part i of `receive` comes from rank i. `repeats` times at once.
  virtual void Exchange(const Parts& send, const Parts& receive, std::size_t nbytes, std::size_t repeats,
                        Stream stream) = 0;

  // What has gone wrong since the last call, on this rank or another; empty: nothing.
  virtual std::string AsyncError() = 0;
  // Ends what is under way and what is queued, without result. No other call but the destructor's may follow. Also from
  // another thread while a call does not return: it then ends with an error.
  virtual void Abort() noexcept = 0;
  // Lets the network read and write `data` directly, where it can; null where not.
  virtual void* Register(void* data, std::size_t nbytes) = 0;
  virtual void Deregister(void* registration) noexcept = 0;
};

}  // namespace zcomm::nccl
