#include "launch.cuh"

namespace zcomm::cuda {

void LaunchDecode(const DecodeArguments& arguments, Stream stream) {
  if (IsBlockCodec(arguments.input.codec)) return LaunchFor<Decoding>(arguments.input.codec, arguments, stream);
  Launch<Decoding, CastCodec>(arguments, stream);
}

void Decode(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output, bool is_added,
            std::int32_t* is_valid, Stream stream) {
  if (input.count == 0) return;
  LaunchDecode(MakeDecodeArguments(layout, input, output, is_added, is_valid), stream);
}

void DecodeSum(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output, float divisor,
               std::int32_t* is_valid, Stream stream) {
  LaunchDecode(MakeDecodeSumArguments(layout, input, output, divisor, is_valid), stream);
}

}  // namespace zcomm::cuda
