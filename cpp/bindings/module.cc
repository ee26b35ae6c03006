// zcomm._native: converts arguments, releases the GIL, and nothing else. The contracts are in the headers. Tensors are
// passed as addresses (int), so that one binary works with every torch version, and a call needs no DLPack handshake.
//
// Every call that computes, reads files or waits releases the GIL. If a thread held it while it waits, threads that
// need it could not run: the autograd thread, the deadlock watch, or the very thread that would end the wait (a
// deadlock).

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "zcomm/check.h"
#include "zcomm/decode.h"
#include "zcomm/difference.h"
#include "zcomm/feedback.h"
#include "zcomm/file_queue.h"
#include "zcomm/isa.h"
#include "zcomm/optimizer_step.h"
#include "zcomm/quantize.h"
#include "zcomm/random.h"
#include "zcomm/reduce.h"
#include "zcomm/ulps.h"

namespace nb = nanobind;
using namespace nb::literals;

void DefineNccl(nb::module_& m);  // nccl.cc

namespace {

using zcomm::MessageLayout;
using zcomm::bindings::Layout;
using zcomm::bindings::MakeDType;
using zcomm::bindings::MakeMessages;
using zcomm::bindings::MakeRows;
using zcomm::bindings::Size;

// seed, tensor, step, hop, rank, first
using DrawArgument =
    std::optional<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, std::uint64_t>>;

std::optional<zcomm::Draw> MakeDraw(const DrawArgument& argument) {
  if (!argument.has_value()) return std::nullopt;
  const auto& [seed, tensor, step, hop, rank, first] = *argument;
  return zcomm::Draw{seed, tensor, step, hop, rank, first};
}

void Quantize(int codec, std::int64_t block, bool is_rotated, std::int64_t num_messages, std::int64_t num_segments,
              std::int64_t segment_numel, int x_dtype, std::uintptr_t x_ptr, std::int64_t message_stride,
              std::int64_t segment_stride, std::uintptr_t out_ptr, std::int64_t out_stride_bytes,
              std::uint32_t layout_hash, const DrawArgument& draw_argument, std::int64_t num_threads) {
  const MessageLayout layout = Layout(codec, block, is_rotated, num_segments, segment_numel);
  const std::optional<zcomm::Draw> draw = MakeDraw(draw_argument);
  const auto input = MakeRows<zcomm::ConstRows>(x_dtype, x_ptr, message_stride, segment_stride);
  const auto output = MakeMessages<zcomm::MutableMessages>(out_ptr, out_stride_bytes, num_messages, layout_hash);
  zcomm::Quantize(layout, input, output, draw ? &*draw : nullptr, Size("num_threads", num_threads));
}

void Decode(int codec, std::int64_t block, bool is_rotated, std::int64_t num_messages, std::int64_t num_segments,
            std::int64_t segment_numel, std::uintptr_t in_ptr, std::int64_t in_stride_bytes, std::uint32_t layout_hash,
            int out_dtype, std::uintptr_t out_ptr, std::int64_t message_stride, std::int64_t segment_stride,
            std::int64_t num_threads) {
  const MessageLayout layout = Layout(codec, block, is_rotated, num_segments, segment_numel);
  const auto input = MakeMessages<zcomm::ConstMessages>(in_ptr, in_stride_bytes, num_messages, layout_hash);
  const auto output = MakeRows<zcomm::MutableRows>(out_dtype, out_ptr, message_stride, segment_stride);
  zcomm::Decode(layout, input, output, Size("num_threads", num_threads));
}

void DecodeSum(int codec, std::int64_t block, bool is_rotated, std::int64_t num_messages, std::int64_t num_segments,
               std::int64_t segment_numel, std::uintptr_t in_ptr, std::int64_t in_stride_bytes,
               std::uint32_t layout_hash, int out_dtype, std::uintptr_t out_ptr, std::int64_t segment_stride,
               float divisor, std::int64_t num_threads) {
  const MessageLayout layout = Layout(codec, block, is_rotated, num_segments, segment_numel);
  const auto input = MakeMessages<zcomm::ConstMessages>(in_ptr, in_stride_bytes, num_messages, layout_hash);
  const auto output = MakeRows<zcomm::MutableRows>(out_dtype, out_ptr, 0, segment_stride);
  zcomm::DecodeSum(layout, input, output, divisor, Size("num_threads", num_threads));
}

void DecodeSumRequantize(int codec, std::int64_t block, bool is_rotated, std::int64_t num_messages,
                         std::int64_t num_segments, std::int64_t segment_numel, std::uintptr_t in_ptr,
                         std::int64_t in_stride_bytes, std::uint32_t layout_hash, int out_codec, std::int64_t out_block,
                         bool out_is_rotated, std::uintptr_t out_ptr, std::int64_t out_stride_bytes,
                         std::uint32_t out_layout_hash, const DrawArgument& draw_argument, std::int64_t num_threads) {
  const std::optional<zcomm::Draw> draw = MakeDraw(draw_argument);
  const MessageLayout layout = Layout(codec, block, is_rotated, num_segments, segment_numel);
  const auto input = MakeMessages<zcomm::ConstMessages>(in_ptr, in_stride_bytes, num_messages, layout_hash);
  const MessageLayout out_layout = Layout(out_codec, out_block, out_is_rotated, 1, segment_numel);
  const auto output = MakeMessages<zcomm::MutableMessages>(out_ptr, out_stride_bytes, num_segments, out_layout_hash);
  zcomm::DecodeSumRequantize(layout, input, out_layout, output, draw ? &*draw : nullptr,
                             Size("num_threads", num_threads));
}

// codes: address, stride in elements; scales: address, stride in elements; beta
using ResidualArgument = std::tuple<std::uintptr_t, std::int64_t, std::uintptr_t, std::int64_t, float>;

zcomm::ResidualRows MakeResidual(const ResidualArgument& argument) {
  const auto& [codes_ptr, codes_stride, scales_ptr, scales_stride, beta] = argument;
  return {reinterpret_cast<std::int8_t*>(codes_ptr), Size("codes_stride", codes_stride),
          reinterpret_cast<std::uint16_t*>(scales_ptr), Size("scales_stride", scales_stride), beta};
}

void QuantizeWithResidual(int codec, std::int64_t block, bool is_rotated, std::int64_t num_messages,
                          std::int64_t num_segments, std::int64_t segment_numel, int x_dtype, std::uintptr_t x_ptr,
                          std::int64_t message_stride, std::int64_t segment_stride, std::uintptr_t out_ptr,
                          std::int64_t out_stride_bytes, std::uint32_t layout_hash, const DrawArgument& draw_argument,
                          const ResidualArgument& residual, std::int64_t num_threads) {
  const MessageLayout layout = Layout(codec, block, is_rotated, num_segments, segment_numel);
  const std::optional<zcomm::Draw> draw = MakeDraw(draw_argument);
  const auto input = MakeRows<zcomm::ConstRows>(x_dtype, x_ptr, message_stride, segment_stride);
  const auto output = MakeMessages<zcomm::MutableMessages>(out_ptr, out_stride_bytes, num_messages, layout_hash);
  zcomm::QuantizeWithResidual(layout, input, output, MakeResidual(residual), draw ? &*draw : nullptr,
                              Size("num_threads", num_threads));
}

void DecodeSumRequantizeWithResidual(int codec, std::int64_t block, bool is_rotated, std::int64_t num_messages,
                                     std::int64_t num_segments, std::int64_t segment_numel, std::uintptr_t in_ptr,
                                     std::int64_t in_stride_bytes, std::uint32_t layout_hash, int out_codec,
                                     std::int64_t out_block, bool out_is_rotated, std::uintptr_t out_ptr,
                                     std::int64_t out_stride_bytes, std::uint32_t out_layout_hash,
                                     const DrawArgument& draw_argument, const ResidualArgument& residual,
                                     std::int64_t num_threads) {
  const std::optional<zcomm::Draw> draw = MakeDraw(draw_argument);
  const MessageLayout layout = Layout(codec, block, is_rotated, num_segments, segment_numel);
  const auto input = MakeMessages<zcomm::ConstMessages>(in_ptr, in_stride_bytes, num_messages, layout_hash);
  const MessageLayout out_layout = Layout(out_codec, out_block, out_is_rotated, 1, segment_numel);
  const auto output = MakeMessages<zcomm::MutableMessages>(out_ptr, out_stride_bytes, num_segments, out_layout_hash);
  zcomm::DecodeSumRequantizeWithResidual(layout, input, out_layout, output, MakeResidual(residual),
                                         draw ? &*draw : nullptr, Size("num_threads", num_threads));
}

void QuantizeDifference(int codec, std::int64_t block, bool is_rotated, std::int64_t num_messages,
                        std::int64_t num_segments, std::int64_t segment_numel, int x_dtype, std::uintptr_t x_ptr,
                        int held_dtype, std::uintptr_t held_ptr, std::int64_t message_stride,
                        std::int64_t segment_stride, std::uintptr_t out_ptr, std::int64_t out_stride_bytes,
                        std::uint32_t layout_hash, const DrawArgument& draw_argument, std::int64_t num_threads) {
  const MessageLayout layout = Layout(codec, block, is_rotated, num_segments, segment_numel);
  const std::optional<zcomm::Draw> draw = MakeDraw(draw_argument);
  const auto input = MakeRows<zcomm::ConstRows>(x_dtype, x_ptr, message_stride, segment_stride);
  const auto output = MakeMessages<zcomm::MutableMessages>(out_ptr, out_stride_bytes, num_messages, layout_hash);
  zcomm::QuantizeDifference(layout, input, MakeDType(held_dtype), reinterpret_cast<const void*>(held_ptr), output,
                            draw ? &*draw : nullptr, Size("num_threads", num_threads));
}

void DecodeAdd(int codec, std::int64_t block, bool is_rotated, std::int64_t num_messages, std::int64_t num_segments,
               std::int64_t segment_numel, std::uintptr_t in_ptr, std::int64_t in_stride_bytes,
               std::uint32_t layout_hash, int out_dtype, std::uintptr_t out_ptr, std::int64_t message_stride,
               std::int64_t segment_stride, std::int64_t num_threads) {
  const MessageLayout layout = Layout(codec, block, is_rotated, num_segments, segment_numel);
  const auto input = MakeMessages<zcomm::ConstMessages>(in_ptr, in_stride_bytes, num_messages, layout_hash);
  const auto output = MakeRows<zcomm::MutableRows>(out_dtype, out_ptr, message_stride, segment_stride);
  zcomm::DecodeAdd(layout, input, output, Size("num_threads", num_threads));
}

// grad_factor, weight_decay, keep, rate, beta1, mix1, beta2, mix2, eps, inverse_root
using FactorsArgument = std::tuple<float, float, float, float, float, float, float, float, float, float>;
// address and dtype
using ArrayArgument = std::tuple<std::uintptr_t, int>;

void OptimizerStep(int rule, const FactorsArgument& factors, std::int64_t numel, std::uintptr_t param_ptr,
                   const ArrayArgument& grad, std::uintptr_t moment1_ptr, std::uintptr_t moment2_ptr, int moment_dtype,
                   std::uintptr_t largest_ptr, const ArrayArgument& out, const DrawArgument& draw_argument,
                   std::int64_t num_threads) {
  const auto& [grad_factor, weight_decay, keep, rate, beta1, mix1, beta2, mix2, eps, inverse_root] = factors;
  const zcomm::StepOptions options{static_cast<zcomm::Rule>(rule),
                                   grad_factor,
                                   weight_decay,
                                   keep,
                                   rate,
                                   beta1,
                                   mix1,
                                   beta2,
                                   mix2,
                                   eps,
                                   inverse_root};
  const zcomm::Shard shard{Size("numel", numel),
                           reinterpret_cast<float*>(param_ptr),
                           reinterpret_cast<const void*>(std::get<0>(grad)),
                           MakeDType(std::get<1>(grad)),
                           reinterpret_cast<void*>(moment1_ptr),
                           reinterpret_cast<void*>(moment2_ptr),
                           MakeDType(moment_dtype),
                           reinterpret_cast<float*>(largest_ptr),
                           reinterpret_cast<void*>(std::get<0>(out)),
                           MakeDType(std::get<1>(out))};
  const std::optional<zcomm::Draw> draw = MakeDraw(draw_argument);
  zcomm::OptimizerStep(options, shard, draw, Size("num_threads", num_threads));
}

void DefineOperations(nb::module_& m) {
  const auto release = nb::call_guard<nb::gil_scoped_release>();
  m.def("quantize", &Quantize, release, "codec"_a, "block"_a, "is_rotated"_a, "num_messages"_a, "num_segments"_a,
        "segment_numel"_a, "x_dtype"_a, "x_ptr"_a, "message_stride"_a, "segment_stride"_a, "out_ptr"_a,
        "out_stride_bytes"_a, "layout_hash"_a, "draw"_a.none(), "num_threads"_a);
  m.def("decode", &Decode, release, "codec"_a, "block"_a, "is_rotated"_a, "num_messages"_a, "num_segments"_a,
        "segment_numel"_a, "in_ptr"_a, "in_stride_bytes"_a, "layout_hash"_a, "out_dtype"_a, "out_ptr"_a,
        "message_stride"_a, "segment_stride"_a, "num_threads"_a);
  m.def("decode_sum", &DecodeSum, release, "codec"_a, "block"_a, "is_rotated"_a, "num_messages"_a, "num_segments"_a,
        "segment_numel"_a, "in_ptr"_a, "in_stride_bytes"_a, "layout_hash"_a, "out_dtype"_a, "out_ptr"_a,
        "segment_stride"_a, "divisor"_a, "num_threads"_a);
  m.def("decode_sum_requantize", &DecodeSumRequantize, release, "codec"_a, "block"_a, "is_rotated"_a, "num_messages"_a,
        "num_segments"_a, "segment_numel"_a, "in_ptr"_a, "in_stride_bytes"_a, "layout_hash"_a, "out_codec"_a,
        "out_block"_a, "out_is_rotated"_a, "out_ptr"_a, "out_stride_bytes"_a, "out_layout_hash"_a, "draw"_a.none(),
        "num_threads"_a);
  m.def("optimizer_step", &OptimizerStep, release, "rule"_a, "factors"_a, "numel"_a, "param_ptr"_a, "grad"_a,
        "moment1_ptr"_a, "moment2_ptr"_a, "moment_dtype"_a, "largest_ptr"_a, "out"_a, "draw"_a.none(), "num_threads"_a);
}

// Operations that combine those above.
void DefineCompoundOperations(nb::module_& m) {
  const auto release = nb::call_guard<nb::gil_scoped_release>();
  m.def("quantize_with_residual", &QuantizeWithResidual, release, "codec"_a, "block"_a, "is_rotated"_a,
        "num_messages"_a, "num_segments"_a, "segment_numel"_a, "x_dtype"_a, "x_ptr"_a, "message_stride"_a,
        "segment_stride"_a, "out_ptr"_a, "out_stride_bytes"_a, "layout_hash"_a, "draw"_a.none(), "residual"_a,
        "num_threads"_a);
  m.def("decode_sum_requantize_with_residual", &DecodeSumRequantizeWithResidual, release, "codec"_a, "block"_a,
        "is_rotated"_a, "num_messages"_a, "num_segments"_a, "segment_numel"_a, "in_ptr"_a, "in_stride_bytes"_a,
        "layout_hash"_a, "out_codec"_a, "out_block"_a, "out_is_rotated"_a, "out_ptr"_a, "out_stride_bytes"_a,
        "out_layout_hash"_a, "draw"_a.none(), "residual"_a, "num_threads"_a);
  m.def("quantize_difference", &QuantizeDifference, release, "codec"_a, "block"_a, "is_rotated"_a, "num_messages"_a,
        "num_segments"_a, "segment_numel"_a, "x_dtype"_a, "x_ptr"_a, "held_dtype"_a, "held_ptr"_a, "message_stride"_a,
        "segment_stride"_a, "out_ptr"_a, "out_stride_bytes"_a, "layout_hash"_a, "draw"_a.none(), "num_threads"_a);
  m.def("decode_add", &DecodeAdd, release, "codec"_a, "block"_a, "is_rotated"_a, "num_messages"_a, "num_segments"_a,
        "segment_numel"_a, "in_ptr"_a, "in_stride_bytes"_a, "layout_hash"_a, "out_dtype"_a, "out_ptr"_a,
        "message_stride"_a, "segment_stride"_a, "num_threads"_a);
}

const std::uint8_t* Bytes(std::uintptr_t ptr) { return reinterpret_cast<const std::uint8_t*>(ptr); }
std::uint16_t* Bits(std::uintptr_t ptr) { return reinterpret_cast<std::uint16_t*>(ptr); }

void DefineUlps(nb::module_& m) {
  const auto release = nb::call_guard<nb::gil_scoped_release>();
  m.def(
      "ulps_encode",
      [](std::uintptr_t new_ptr, std::uintptr_t old_ptr, std::int64_t numel, std::uintptr_t message_ptr,
         std::int64_t message_nbytes) {
        return zcomm::EncodeUlps(Bits(new_ptr), Bits(old_ptr), Size("numel", numel),
                                 reinterpret_cast<std::uint8_t*>(message_ptr), Size("message_nbytes", message_nbytes));
      },
      release, "new_ptr"_a, "old_ptr"_a, "numel"_a, "message_ptr"_a, "message_nbytes"_a);
  m.def(
      "ulps_decode",
      [](std::uintptr_t message_ptr, std::int64_t message_nbytes, std::uintptr_t values_ptr, std::int64_t numel) {
        zcomm::DecodeUlps(Bytes(message_ptr), Size("message_nbytes", message_nbytes), Bits(values_ptr),
                          Size("numel", numel));
      },
      release, "message_ptr"_a, "message_nbytes"_a, "values_ptr"_a, "numel"_a);
  m.def(
      "ulps_message_nbytes",
      [](std::uintptr_t head_ptr, std::int64_t head_nbytes) {
        return zcomm::UlpsMessageNbytes(Bytes(head_ptr), Size("head_nbytes", head_nbytes));
      },
      "head_ptr"_a, "head_nbytes"_a);
}

// OSError(errno, text, path, if it is about a file), which Python makes a FileNotFoundError and so on.
void ThrowOsError(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const zcomm::FileError& e) {
    PyObject* arguments = e.path().empty() ? Py_BuildValue("(is)", e.number(), e.what())
                                           : Py_BuildValue("(iss)", e.number(), e.what(), e.path().c_str());
    if (arguments == nullptr) return;
    PyErr_SetObject(PyExc_OSError, arguments);
    Py_DECREF(arguments);
  }
}

zcomm::FileKind MakeFileKind(bool is_checked) {
  return is_checked ? zcomm::FileKind::kChecked : zcomm::FileKind::kPlain;
}

void DefineFileQueue(nb::module_& m) {
  using zcomm::FileQueue;
  const auto release = nb::call_guard<nb::gil_scoped_release>();
  nb::register_exception_translator(ThrowOsError);
  m.attr("FILE_ALIGNMENT") = zcomm::kFileAlignment;
  m.def(
      "checked_file_nbytes", [](std::int64_t nbytes) { return zcomm::CheckedFile::FileNbytes(Size("nbytes", nbytes)); },
      "nbytes"_a);
  nb::class_<FileQueue>(m, "FileQueue")
      .def(
          "__init__",
          [](FileQueue* self, std::int64_t num_requests, std::int64_t request_nbytes, bool may_use_ring) {
            new (self)
                FileQueue(Size("num_requests", num_requests), Size("request_nbytes", request_nbytes), may_use_ring);
          },
          "num_requests"_a, "request_nbytes"_a, "may_use_ring"_a = true)
      .def_prop_ro("engine", [](const FileQueue& self) { return std::string(zcomm::FileEngineName(self.engine())); })
      .def(
          "create",
          [](FileQueue& self, const std::string& path, std::int64_t nbytes, bool is_checked) {
            return self.Create(path, Size("nbytes", nbytes), MakeFileKind(is_checked));
          },
          release, "path"_a, "nbytes"_a, "is_checked"_a = false)
      .def(
          "open",
          [](FileQueue& self, const std::string& path, bool is_checked) {
            return self.Open(path, MakeFileKind(is_checked));
          },
          release, "path"_a, "is_checked"_a = false)
      .def("size", &FileQueue::Size, release, "file"_a)
      .def("sync", &FileQueue::Sync, release, "file"_a)
      .def("close", &FileQueue::Close, release, "file"_a)
      .def(
          "read",
          [](FileQueue& self, int file, std::int64_t offset, std::uintptr_t ptr, std::int64_t nbytes) {
            return self.Read(file, Size("offset", offset), reinterpret_cast<void*>(ptr), Size("nbytes", nbytes));
          },
          release, "file"_a, "offset"_a, "ptr"_a, "nbytes"_a)
      .def(
          "write",
          [](FileQueue& self, int file, std::int64_t offset, std::uintptr_t ptr, std::int64_t nbytes) {
            return self.Write(file, Size("offset", offset), reinterpret_cast<void*>(ptr), Size("nbytes", nbytes));
          },
          release, "file"_a, "offset"_a, "ptr"_a, "nbytes"_a)
      .def("is_done", &FileQueue::IsDone, release, "ticket"_a)
      .def("wait", &FileQueue::Wait, release, "ticket"_a);
}

nb::dict BuildInfo() {
  std::vector<std::string> levels;
#ifdef ZCOMM_X86
  levels = {zcomm::IsaName(zcomm::Isa::kAvx512), zcomm::IsaName(zcomm::Isa::kAvx2)};
#endif
  levels.emplace_back(zcomm::IsaName(zcomm::Isa::kBaseline));
#ifdef __clang__
  const std::string compiler = "clang " __clang_version__;
#else
  const std::string compiler = "gcc " __VERSION__;
#endif
  nb::dict info;
  info["version"] = ZCOMM_VERSION;
  info["compiler"] = compiler;
  info["isa_levels"] = levels;
#ifdef ZCOMM_HAS_CUDA
  info["cuda"] = ZCOMM_CUDA_VERSION;
#else
  info["cuda"] = "";
#endif
  return info;
}

// Names and numbers.
nb::dict Codecs() {
  nb::dict numbers;
  numbers["f32"] = static_cast<int>(zcomm::Codec::kFloat32);
  numbers["bf16"] = static_cast<int>(zcomm::Codec::kBfloat16);
  numbers["fp16"] = static_cast<int>(zcomm::Codec::kFloat16);
#define ZCOMM_CODEC(id, name, number, ...) numbers[name] = number;
#include "zcomm/codecs.def"
  return numbers;
}

}  // namespace

#ifdef ZCOMM_HAS_CUDA
void DefineCudaOperations(nb::module_& m);
#endif

NB_MODULE(_native, m) {
  m.doc() = "Native CPU kernels of zcomm's wire formats; see _native.pyi.";
  DefineOperations(m);
  DefineCompoundOperations(m);
  m.def(
      "message_nbytes",
      [](int codec, std::int64_t block, bool is_rotated, std::int64_t num_segments, std::int64_t segment_numel) {
        return Layout(codec, block, is_rotated, num_segments, segment_numel).nbytes;
      },
      "codec"_a, "block"_a, "is_rotated"_a, "num_segments"_a, "segment_numel"_a);
  m.attr("CODECS") = Codecs();
  DefineUlps(m);
  DefineFileQueue(m);
#ifdef ZCOMM_HAS_CUDA
  DefineCudaOperations(m);
#endif
  DefineNccl(m);
  m.def("isa", [] { return std::string(zcomm::IsaName(zcomm::ActiveIsa())); });
  m.def("build_info", &BuildInfo);
}
