#include "launch.cuh"

namespace zcomm::cuda {

void Quantize(const MessageLayout& layout, const ConstRows& input, const ConstRows* held, const Residual* residual,
              const MutableMessages& output, Stream stream, const Expected& expected) {
  if (output.count == 0) return;
  if (!IsBlockCodec(layout.codec) && held == nullptr && residual == nullptr && expected.count == 0) {
    return LaunchDecode(MakeCastArguments(layout, input, output), stream);
  }
  LaunchFor<Quantizing>(layout.codec, MakeQuantizeArguments(layout, input, held, residual, output, expected), stream);
}

}  // namespace zcomm::cuda
