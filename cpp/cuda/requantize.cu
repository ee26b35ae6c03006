#include "launch.cuh"

namespace zcomm::cuda {

void DecodeSumRequantize(const MessageLayout& layout, const ConstMessages& input, const MessageLayout& out_layout,
                         const MutableMessages& output, const Residual* residual, std::int32_t* is_valid, Stream stream,
                         const Expected& expected) {
  if (!IsBlockCodec(out_layout.codec) && residual == nullptr && expected.count == 0) {
    const auto dtype = static_cast<DType>(out_layout.codec);
    const MutableRows rows{dtype, output.data, 0, output.stride_nbytes / ItemSize(dtype)};
    CheckRequantized(layout, out_layout, output);
    return DecodeSum(layout, input, rows, 1.0F, is_valid, stream);
  }
  LaunchFor<Requantizing>(out_layout.codec,
                          MakeRequantizeArguments(layout, input, out_layout, output, residual, is_valid, expected),
                          stream);
}

}  // namespace zcomm::cuda
