#include "host_device.h"

#include <cstring>
#include <functional>
#include <new>
#include <stdexcept>

#include "arguments.h"
#include "host_stream.h"
#include "zcomm/cuda_kernels.h"
#include "zcomm/decode.h"
#include "zcomm/quantize.h"
#include "zcomm/reduce.h"

namespace zcomm::nccl {
namespace {

constexpr std::align_val_t kAlignment{256};  // the alignment of cudaMalloc

WorkStream* Of(Stream stream) {
  if (stream == nullptr) throw std::runtime_error("a host stream must not be null: the host has no default stream");
  return static_cast<WorkStream*>(stream);
}
HostEvent* OfEvent(Event event) { return static_cast<HostEvent*>(event); }

class HostDevice final : public Device {
 public:
  Stream CreateStream() override { return (new HostStream)->handle(); }
  void DestroyStream(Stream stream) noexcept override { delete static_cast<WorkStream*>(stream); }
  Event CreateEvent() override { return new HostEvent; }
  void DestroyEvent(Event event) noexcept override { delete OfEvent(event); }

  void Record(Event event, Stream stream) override { OfEvent(event)->Record(Of(stream)); }
  void Wait(Stream stream, Event event) override {
    Of(stream)->Queue([recorded = *OfEvent(event)] { recorded.Wait(); });
  }
  bool IsDone(Event event) override { return OfEvent(event)->IsDone(); }
  bool IsCapturing(Stream /*stream*/) override { return false; }

  void* Allocate(std::size_t nbytes) override { return ::operator new(nbytes, kAlignment); }
  void Free(void* data) noexcept override {
    HostStream::WaitForAll();
    ::operator delete(data, kAlignment);
  }
  void Copy(void* to, const void* from, std::size_t nbytes, Stream stream) override {
    Of(stream)->Queue([=] { std::memcpy(to, from, nbytes); });
  }
};

// Queues `decode`. If it refuses a message with a wrong trailer, *is_valid becomes 0, as on a GPU: no caller could
// catch an exception on the stream's thread.
template <class Call>
void QueueDecoding(std::int32_t* is_valid, Stream stream, const Call& decode) {
  Of(stream)->Queue([=] {
    try {
      decode();
    } catch (const std::invalid_argument&) {
      if (is_valid != nullptr) *is_valid = 0;
    }
  });
}

class HostKernels final : public Kernels {
 public:
  void Quantize(const MessageLayout& layout, const ConstRows& input, const MutableMessages& output,
                const Expected& expected, Stream stream) override {
    if (IsBlockCodec(layout.codec)) {
      cuda::MakeQuantizeArguments(layout, input, nullptr, nullptr, output, expected);
    } else {
      cuda::MakeCastArguments(layout, input, output);
    }
    Of(stream)->Queue([=] {
      ClearExpected(layout, expected, output);
      zcomm::Quantize(layout, input, output, nullptr, 1);
    });
  }
  void Decode(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output,
              std::int32_t* is_valid, Stream stream) override {
    cuda::MakeDecodeArguments(layout, input, output, /*is_added=*/false, is_valid);
    QueueDecoding(is_valid, stream, [=] { zcomm::Decode(layout, input, output, 1); });
  }
  void DecodeSum(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output, float divisor,
                 std::int32_t* is_valid, Stream stream) override {
    cuda::MakeDecodeSumArguments(layout, input, output, divisor, is_valid);
    QueueDecoding(is_valid, stream, [=] { zcomm::DecodeSum(layout, input, output, divisor, 1); });
  }
  void DecodeSumRequantize(const MessageLayout& layout, const ConstMessages& input, const MessageLayout& out_layout,
                           const MutableMessages& output, const Expected& expected, std::int32_t* is_valid,
                           Stream stream) override {
    CheckRequantized(layout, out_layout, output);
    if (IsBlockCodec(out_layout.codec)) {
      cuda::MakeRequantizeArguments(layout, input, out_layout, output, nullptr, is_valid, expected);
    }
    QueueDecoding(is_valid, stream, [=] {
      ClearExpected(out_layout, expected, output);
      // If an input is refused, nothing is written: receivers must not accept an earlier call's messages in its place.
      ClearTrailers(out_layout, output);  // before the inputs are checked
      zcomm::DecodeSumRequantize(layout, input, out_layout, output, nullptr, 1);
    });
  }

 private:
  // Zeroes the trailers of expected messages, except of those that the call writes: on a GPU, clearing and writing
  // happen in one kernel, in no particular order.
  static void ClearExpected(const MessageLayout& layout, const Expected& expected, const MutableMessages& output) {
    const std::uint8_t* end = output.data + output.count * output.stride_nbytes;
    for (std::size_t i = 0; i < expected.count; ++i) {
      std::uint8_t* message = expected.data + i * layout.nbytes;
      if (message < output.data || message >= end) std::memset(message + layout.trailer_offset(), 0, kTrailerNbytes);
    }
  }
};

}  // namespace

std::shared_ptr<Device> MakeHostDevice() { return std::make_shared<HostDevice>(); }

std::shared_ptr<Kernels> MakeHostKernels() { return std::make_shared<HostKernels>(); }

}  // namespace zcomm::nccl
