// The oracle of every operation: block by block, in the order of the numerics contract. It shares only the message
// layout with the vector kernels.

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "reference_codecs.h"
#include "zcomm/check.h"
#include "zcomm/decode.h"
#include "zcomm/float_formats.h"
#include "zcomm/quantize.h"
#include "zcomm/reduce.h"

namespace zcomm {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max();

std::size_t HeaderOffset(const MessageLayout& layout, std::size_t segment, std::size_t begin) {
  return HeaderNbytes(layout.codec) * (segment * layout.blocks_per_segment + begin / layout.block);
}

void StoreCode(const MessageLayout& layout, std::size_t segment, std::size_t element, int code, std::uint8_t* message) {
  std::uint8_t* codes = message + layout.codes_offset + segment * layout.segment_codes_nbytes;
  if (CodeBits(layout.codec) == 8) {
    codes[element] = static_cast<std::uint8_t>(code);
  } else if (element % 2 == 0) {
    codes[element / 2] = static_cast<std::uint8_t>(code & 0x0F);
  } else {
    codes[element / 2] = static_cast<std::uint8_t>(codes[element / 2] | ((code & 0x0F) << 4));
  }
}

int LoadCode(const MessageLayout& layout, std::size_t segment, std::size_t element, const std::uint8_t* message) {
  const std::uint8_t* codes = message + layout.codes_offset + segment * layout.segment_codes_nbytes;
  if (CodeBits(layout.codec) == 8) return codes[element];
  return element % 2 == 0 ? codes[element / 2] & 0x0F : codes[element / 2] >> 4;
}

bool IsRotated(const MessageLayout& layout, const std::vector<float>& block) {
  return layout.is_rotated && block.size() == layout.block;
}

// `values` are those of the segment; element e uses random number `first` + e of `draw`.
void QuantizeSegment(const MessageLayout& layout, std::size_t segment, const std::vector<float>& values,
                     const Draw* draw, std::uint64_t first, std::uint8_t* message) {
  if (!IsBlockCodec(layout.codec)) {
    for (std::size_t e = 0; e < values.size(); ++e) {
      StoreElement(static_cast<DType>(layout.codec), message, segment * layout.segment_numel + e, values[e]);
    }
    return;
  }
  for (std::size_t begin = 0; begin < values.size(); begin += layout.block) {
    const std::size_t end = std::min(begin + layout.block, values.size());
    std::vector<float> block(values.begin() + static_cast<std::ptrdiff_t>(begin),
                             values.begin() + static_cast<std::ptrdiff_t>(end));
    std::vector<float> uniform;
    for (std::size_t e = begin; draw != nullptr && e < end; ++e) uniform.push_back(Uniform24(*draw, first + e));
    if (IsRotated(layout, block)) RotateRef(&block);
    const EncodedBlock encoded = EncodeBlockRef(layout.codec, block, uniform);
    std::memcpy(message + HeaderOffset(layout, segment, begin), &encoded.header, HeaderNbytes(layout.codec));
    for (std::size_t e = begin; e < end; ++e) StoreCode(layout, segment, e, encoded.codes[e - begin], message);
  }
}

// One segment of one message in float32, clamped to +-limit for block codecs.
std::vector<float> DecodeSegment(const MessageLayout& layout, const std::uint8_t* message, std::size_t segment,
                                 float limit) {
  std::vector<float> values;
  if (!IsBlockCodec(layout.codec)) {
    for (std::size_t e = 0; e < layout.segment_numel; ++e) {
      values.push_back(LoadElement(static_cast<DType>(layout.codec), message, segment * layout.segment_numel + e));
    }
    return values;
  }
  for (std::size_t begin = 0; begin < layout.segment_numel; begin += layout.block) {
    EncodedBlock encoded{0, {}};
    std::memcpy(&encoded.header, message + HeaderOffset(layout, segment, begin), HeaderNbytes(layout.codec));
    for (std::size_t e = begin; e < std::min(begin + layout.block, layout.segment_numel); ++e) {
      encoded.codes.push_back(LoadCode(layout, segment, e, message));
    }
    std::vector<float> block = DecodeBlockRef(layout.codec, encoded);
    if (IsRotated(layout, block)) {
      RotateRef(&block);
      for (float& value : block) value *= 1.0F / static_cast<float>(layout.block);
    }
    for (const float value : block) values.push_back(ClampRef(value, limit));
  }
  return values;
}

std::vector<float> SumSegment(const MessageLayout& layout, const ConstMessages& input, std::size_t segment) {
  std::vector<float> sum = DecodeSegment(layout, input.data, segment, kLargest);
  for (std::size_t i = 1; i < input.count; ++i) {
    const std::vector<float> terms = DecodeSegment(layout, input.data + i * input.stride_nbytes, segment, kLargest);
    for (std::size_t e = 0; e < sum.size(); ++e) sum[e] += terms[e];
  }
  return sum;
}

}  // namespace

void QuantizeRef(const MessageLayout& layout, const ConstRows& input, const MutableMessages& output, const Draw* draw) {
  CheckMessages(layout, AsConst(output), "output");
  if (output.count != 0) CheckRows(layout, input, "input");
  for (std::size_t i = 0; i < output.count; ++i) {
    std::uint8_t* message = output.data + i * output.stride_nbytes;
    for (std::size_t s = 0; s < layout.num_segments; ++s) {
      const std::size_t row = i * input.message_stride + s * input.segment_stride;
      std::vector<float> values;
      for (std::size_t e = 0; e < layout.segment_numel; ++e) {
        values.push_back(LoadElement(input.dtype, input.data, row + e));
      }
      QuantizeSegment(layout, s, values, draw, row, message);
    }
    WriteTrailer(layout, output.layout_hash, message);
  }
}

void DecodeRef(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output) {
  CheckMessages(layout, input, "input");
  if (input.count != 0) CheckRows(layout, AsConst(output), "output");
  CheckTrailers(layout, input);
  const float limit = MaxFinite(output.dtype);
  for (std::size_t i = 0; i < input.count; ++i) {
    for (std::size_t s = 0; s < layout.num_segments; ++s) {
      const std::size_t row = i * output.message_stride + s * output.segment_stride;
      const std::vector<float> values = DecodeSegment(layout, input.data + i * input.stride_nbytes, s, limit);
      for (std::size_t e = 0; e < values.size(); ++e) StoreElement(output.dtype, output.data, row + e, values[e]);
    }
  }
}

void DecodeSumRef(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output, float divisor) {
  ZCOMM_CHECK(input.count >= 1, "a sum needs at least one message: num_messages=", input.count);
  CheckMessages(layout, input, "input");
  CheckRows(layout, AsConst(output), "output");
  CheckTrailers(layout, input);
  for (std::size_t s = 0; s < layout.num_segments; ++s) {
    const std::vector<float> sum = SumSegment(layout, input, s);
    for (std::size_t e = 0; e < sum.size(); ++e) {
      StoreElement(output.dtype, output.data, s * output.segment_stride + e,
                   divisor == 1.0F ? sum[e] : sum[e] / divisor);
    }
  }
}

void DecodeSumRequantizeRef(const MessageLayout& layout, const ConstMessages& input, const MessageLayout& out_layout,
                            const MutableMessages& output, const Draw* draw) {
  ZCOMM_CHECK(input.count >= 1, "a sum needs at least one message: num_messages=", input.count);
  CheckMessages(layout, input, "input");
  CheckMessages(out_layout, AsConst(output), "output");
  CheckTrailers(layout, input);
  for (std::size_t s = 0; s < output.count; ++s) {
    std::uint8_t* message = output.data + s * output.stride_nbytes;
    QuantizeSegment(out_layout, 0, SumSegment(layout, input, s), draw, s * layout.segment_numel, message);
    WriteTrailer(out_layout, output.layout_hash, message);
  }
}

}  // namespace zcomm
