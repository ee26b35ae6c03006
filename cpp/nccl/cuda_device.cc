#include "cuda_device.h"

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "zcomm/cuda_kernels.h"

namespace zcomm::nccl {
namespace {

void Check(cudaError_t result, const char* call) {
  if (result == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(result));
}

cudaStream_t Of(Stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t OfEvent(Event event) { return static_cast<cudaEvent_t>(event); }

// Makes a GPU the current one of this thread while the object lives.
class OnDevice {
 public:
  explicit OnDevice(int index) {
    if (cudaGetDevice(&before_) != cudaSuccess || cudaSetDevice(index) != cudaSuccess) before_ = index;
  }
  ~OnDevice() { static_cast<void>(cudaSetDevice(before_)); }

 private:
  int before_ = 0;
};

// While it lives, this thread's CUDA calls invalidate no capture. In the default (global) mode, cudaEventQuery or
// cudaFree would invalidate a capture of any thread; in thread-local mode, one of this thread.
class BesideCaptures {
 public:
  BesideCaptures() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~BesideCaptures() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class CudaDevice final : public Device {
 public:
  CudaDevice(int index, const Library* library) : index_(index), nccl_(library->functions) {}

  Stream CreateStream() override {
    const OnDevice on(index_);
    int lowest = 0;
    int highest = 0;
    Check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t stream = nullptr;
    // Non-blocking: otherwise work on the legacy default stream would serialize with ours.
    Check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest), "cudaStreamCreateWithPriority");
    return stream;
  }
  void DestroyStream(Stream stream) noexcept override { static_cast<void>(cudaStreamDestroy(Of(stream))); }

  Event CreateEvent() override {
    const OnDevice on(index_);
    cudaEvent_t event = nullptr;
    Check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return event;
  }
  void DestroyEvent(Event event) noexcept override { static_cast<void>(cudaEventDestroy(OfEvent(event))); }

  void Record(Event event, Stream stream) override {
    Check(cudaEventRecord(OfEvent(event), Of(stream)), "cudaEventRecord");
  }
  void Wait(Stream stream, Event event) override {
    Check(cudaStreamWaitEvent(Of(stream), OfEvent(event), 0), "cudaStreamWaitEvent");
  }
  bool IsDone(Event event) override {
    const BesideCaptures beside;
    const cudaError_t result = cudaEventQuery(OfEvent(event));
    if (result == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());  // clear it: PyTorch would report "not ready" as an error of its own
      return false;
    }
    Check(result, "cudaEventQuery");
    return true;
  }
  void MakeCurrent() override { Check(cudaSetDevice(index_), "cudaSetDevice"); }
  bool IsCapturing(Stream stream) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    Check(cudaStreamIsCapturing(Of(stream), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  void* Allocate(std::size_t nbytes) override {
    const OnDevice on(index_);
    void* data = nullptr;
    if (nccl_.mem_alloc == nullptr) {
      Check(cudaMalloc(&data, nbytes), "cudaMalloc");
    } else {
      const Result result = nccl_.mem_alloc(&data, nbytes);
      if (result != Result::kSuccess) {
        throw std::runtime_error("ncclMemAlloc of " + std::to_string(nbytes) +
                                 " bytes: " + nccl_.get_error_string(result));
      }
    }
    return data;
  }
  void Free(void* data) noexcept override {
    const OnDevice on(index_);
    const BesideCaptures beside;
    if (nccl_.mem_free == nullptr) {
      static_cast<void>(cudaFree(data));
    } else {
      static_cast<void>(cudaDeviceSynchronize());  // cudaFree waits for the device; ncclMemFree does not promise to
      nccl_.mem_free(data);
    }
  }
  void Copy(void* to, const void* from, std::size_t nbytes, Stream stream) override {
    Check(cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDeviceToDevice, Of(stream)), "cudaMemcpyAsync");
  }

 private:
  int index_;
  const Functions& nccl_;
};

class CudaKernels final : public Kernels {
 public:
  void Quantize(const MessageLayout& layout, const ConstRows& input, const MutableMessages& output,
                const Expected& expected, Stream stream) override {
    cuda::Quantize(layout, input, nullptr, nullptr, output, stream, expected);
  }
  void Decode(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output,
              std::int32_t* is_valid, Stream stream) override {
    cuda::Decode(layout, input, output, /*is_added=*/false, is_valid, stream);
  }
  void DecodeSum(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output, float divisor,
                 std::int32_t* is_valid, Stream stream) override {
    cuda::DecodeSum(layout, input, output, divisor, is_valid, stream);
  }
  void DecodeSumRequantize(const MessageLayout& layout, const ConstMessages& input, const MessageLayout& out_layout,
                           const MutableMessages& output, const Expected& expected, std::int32_t* is_valid,
                           Stream stream) override {
    cuda::DecodeSumRequantize(layout, input, out_layout, output, nullptr, is_valid, stream, expected);
  }
};

}  // namespace

std::shared_ptr<Device> MakeCudaDevice(int index, const Library* library) {
  return std::make_shared<CudaDevice>(index, library);
}

std::shared_ptr<Kernels> MakeCudaKernels() { return std::make_shared<CudaKernels>(); }

}  // namespace zcomm::nccl
