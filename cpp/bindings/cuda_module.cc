// The part of zcomm._native that runs the operations of zcomm/cuda_kernels.h on a GPU. As in module.cc, tensors are
// passed as addresses.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "arguments.h"
#include "zcomm/cuda_kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using zcomm::ConstMessages;
using zcomm::ConstRows;
using zcomm::MessageLayout;
using zcomm::MutableMessages;
using zcomm::MutableRows;
using zcomm::bindings::Layout;
using zcomm::bindings::MakeMessages;
using zcomm::bindings::MakeRows;
using zcomm::bindings::Size;
using zcomm::cuda::Residual;
using zcomm::cuda::Stream;

// dtype and address; its strides are the other array's
using HeldArgument = std::optional<std::tuple<int, std::uintptr_t>>;
// addresses of codes and scales, their strides from row to row in elements, beta
using ResidualArgument = std::optional<std::tuple<std::uintptr_t, std::uintptr_t, std::int64_t, std::int64_t, float>>;

std::optional<Residual> MakeResidual(const ResidualArgument& argument) {
  if (!argument.has_value()) return std::nullopt;
  const auto& [codes, scales, codes_stride, scales_stride, beta] = *argument;
  return Residual{reinterpret_cast<std::int8_t*>(codes), reinterpret_cast<std::uint16_t*>(scales),
                  Size("codes_stride", codes_stride), Size("scales_stride", scales_stride), beta};
}

// address of the first, how many
using ExpectedArgument = std::tuple<std::uintptr_t, std::int64_t>;

zcomm::cuda::Expected MakeExpected(const ExpectedArgument& argument) {
  const auto& [address, count] = argument;
  return {reinterpret_cast<std::uint8_t*>(address), Size("num_expected", count)};
}

std::int32_t* Flag(std::uintptr_t address) { return reinterpret_cast<std::int32_t*>(address); }
Stream MakeStream(std::uintptr_t stream) { return reinterpret_cast<Stream>(stream); }

void Quantize(int codec, std::int64_t block, bool is_rotated, std::int64_t num_messages, std::int64_t num_segments,
              std::int64_t segment_numel, int x_dtype, std::uintptr_t x_ptr, std::int64_t message_stride,
              std::int64_t segment_stride, std::uintptr_t out_ptr, std::int64_t out_stride_bytes,
              std::uint32_t layout_hash, const HeldArgument& held_argument, const ResidualArgument& residual_argument,
              const ExpectedArgument& expected, std::uintptr_t stream) {
  const MessageLayout layout = Layout(codec, block, is_rotated, num_segments, segment_numel);
  const auto input = MakeRows<ConstRows>(x_dtype, x_ptr, message_stride, segment_stride);
  const auto output = MakeMessages<MutableMessages>(out_ptr, out_stride_bytes, num_messages, layout_hash);
  std::optional<ConstRows> held;
  if (held_argument) {
    held =
        MakeRows<ConstRows>(std::get<0>(*held_argument), std::get<1>(*held_argument), message_stride, segment_stride);
  }
  const std::optional<Residual> residual = MakeResidual(residual_argument);
  zcomm::cuda::Quantize(layout, input, held ? &*held : nullptr, residual ? &*residual : nullptr, output,
                        MakeStream(stream), MakeExpected(expected));
}

void Decode(int codec, std::int64_t block, bool is_rotated, std::int64_t num_messages, std::int64_t num_segments,
            std::int64_t segment_numel, std::uintptr_t in_ptr, std::int64_t in_stride_bytes, std::uint32_t layout_hash,
            int out_dtype, std::uintptr_t out_ptr, std::int64_t message_stride, std::int64_t segment_stride,
            bool is_added, std::uintptr_t is_valid_ptr, std::uintptr_t stream) {
  const MessageLayout layout = Layout(codec, block, is_rotated, num_segments, segment_numel);
  const auto input = MakeMessages<ConstMessages>(in_ptr, in_stride_bytes, num_messages, layout_hash);
  const auto output = MakeRows<MutableRows>(out_dtype, out_ptr, message_stride, segment_stride);
  zcomm::cuda::Decode(layout, input, output, is_added, Flag(is_valid_ptr), MakeStream(stream));
}

void DecodeSum(int codec, std::int64_t block, bool is_rotated, std::int64_t num_messages, std::int64_t num_segments,
               std::int64_t segment_numel, std::uintptr_t in_ptr, std::int64_t in_stride_bytes,
               std::uint32_t layout_hash, int out_dtype, std::uintptr_t out_ptr, std::int64_t segment_stride,
               float divisor, std::uintptr_t is_valid_ptr, std::uintptr_t stream) {
  const MessageLayout layout = Layout(codec, block, is_rotated, num_segments, segment_numel);
  const auto input = MakeMessages<ConstMessages>(in_ptr, in_stride_bytes, num_messages, layout_hash);
  const auto output = MakeRows<MutableRows>(out_dtype, out_ptr, 0, segment_stride);
  zcomm::cuda::DecodeSum(layout, input, output, divisor, Flag(is_valid_ptr), MakeStream(stream));
}

void DecodeSumRequantize(int codec, std::int64_t block, bool is_rotated, std::int64_t num_messages,
                         std::int64_t num_segments, std::int64_t segment_numel, std::uintptr_t in_ptr,
                         std::int64_t in_stride_bytes, std::uint32_t layout_hash, int out_codec, std::int64_t out_block,
                         bool out_is_rotated, std::uintptr_t out_ptr, std::int64_t out_stride_bytes,
                         std::uint32_t out_layout_hash, const ResidualArgument& residual_argument,
                         const ExpectedArgument& expected, std::uintptr_t is_valid_ptr, std::uintptr_t stream) {
  const MessageLayout layout = Layout(codec, block, is_rotated, num_segments, segment_numel);
  const MessageLayout out_layout = Layout(out_codec, out_block, out_is_rotated, 1, segment_numel);
  const auto input = MakeMessages<ConstMessages>(in_ptr, in_stride_bytes, num_messages, layout_hash);
  const auto output = MakeMessages<MutableMessages>(out_ptr, out_stride_bytes, num_segments, out_layout_hash);
  const std::optional<Residual> residual = MakeResidual(residual_argument);
  zcomm::cuda::DecodeSumRequantize(layout, input, out_layout, output, residual ? &*residual : nullptr,
                                   Flag(is_valid_ptr), MakeStream(stream), MakeExpected(expected));
}

}  // namespace

void DefineCudaOperations(nb::module_& m) {
  const auto release = nb::call_guard<nb::gil_scoped_release>();
  m.def("cuda_quantize", &Quantize, release, "codec"_a, "block"_a, "is_rotated"_a, "num_messages"_a, "num_segments"_a,
        "segment_numel"_a, "x_dtype"_a, "x_ptr"_a, "message_stride"_a, "segment_stride"_a, "out_ptr"_a,
        "out_stride_bytes"_a, "layout_hash"_a, "held"_a.none(), "residual"_a.none(), "expected"_a, "stream"_a);
  m.def("cuda_decode", &Decode, release, "codec"_a, "block"_a, "is_rotated"_a, "num_messages"_a, "num_segments"_a,
        "segment_numel"_a, "in_ptr"_a, "in_stride_bytes"_a, "layout_hash"_a, "out_dtype"_a, "out_ptr"_a,
        "message_stride"_a, "segment_stride"_a, "is_added"_a, "is_valid_ptr"_a, "stream"_a);
  m.def("cuda_decode_sum", &DecodeSum, release, "codec"_a, "block"_a, "is_rotated"_a, "num_messages"_a,
        "num_segments"_a, "segment_numel"_a, "in_ptr"_a, "in_stride_bytes"_a, "layout_hash"_a, "out_dtype"_a,
        "out_ptr"_a, "segment_stride"_a, "divisor"_a, "is_valid_ptr"_a, "stream"_a);
  m.def("cuda_decode_sum_requantize", &DecodeSumRequantize, release, "codec"_a, "block"_a, "is_rotated"_a,
        "num_messages"_a, "num_segments"_a, "segment_numel"_a, "in_ptr"_a, "in_stride_bytes"_a, "layout_hash"_a,
        "out_codec"_a, "out_block"_a, "out_is_rotated"_a, "out_ptr"_a, "out_stride_bytes"_a, "out_layout_hash"_a,
        "residual"_a.none(), "expected"_a, "is_valid_ptr"_a, "stream"_a);
  m.def(
      "cuda_ulps_encode_workspace_nbytes",
      [](std::int64_t numel) { return zcomm::cuda::UlpsEncodeWorkspaceNbytes(Size("numel", numel)); }, "numel"_a);
  m.def(
      "cuda_ulps_decode_workspace_nbytes",
      [](std::int64_t numel) { return zcomm::cuda::UlpsDecodeWorkspaceNbytes(Size("numel", numel)); }, "numel"_a);
  m.def(
      "cuda_ulps_encode",
      [](std::uintptr_t new_ptr, std::uintptr_t old_ptr, std::int64_t numel, std::uintptr_t message_ptr,
         std::uintptr_t workspace_ptr, std::uintptr_t stream) {
        zcomm::cuda::EncodeUlps(reinterpret_cast<const std::uint16_t*>(new_ptr),
                                reinterpret_cast<const std::uint16_t*>(old_ptr), Size("numel", numel),
                                reinterpret_cast<std::uint8_t*>(message_ptr), reinterpret_cast<void*>(workspace_ptr),
                                MakeStream(stream));
      },
      release, "new_ptr"_a, "old_ptr"_a, "numel"_a, "message_ptr"_a, "workspace_ptr"_a, "stream"_a);
  m.def(
      "cuda_ulps_decode",
      [](std::uintptr_t message_ptr, std::int64_t message_nbytes, std::uintptr_t values_ptr, std::int64_t numel,
         std::uintptr_t workspace_ptr, std::uintptr_t is_valid_ptr, std::uintptr_t stream) {
        zcomm::cuda::DecodeUlps(reinterpret_cast<const std::uint8_t*>(message_ptr),
                                Size("message_nbytes", message_nbytes), reinterpret_cast<std::uint16_t*>(values_ptr),
                                Size("numel", numel), reinterpret_cast<void*>(workspace_ptr), Flag(is_valid_ptr),
                                MakeStream(stream));
      },
      release, "message_ptr"_a, "message_nbytes"_a, "values_ptr"_a, "numel"_a, "workspace_ptr"_a, "is_valid_ptr"_a,
      "stream"_a);
}
