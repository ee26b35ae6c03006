#include "collective_case.h"

#include "test_util.h"
#include "zcomm/decode.h"
#include "zcomm/quantize.h"

namespace zcomm::nccl {
namespace {

constexpr std::uint32_t kHash = 7;

// Encodes and decodes `numel` elements of `x` as one message.
Bytes RoundTrip(const Wire& wire, DType from, const std::uint8_t* x, std::size_t numel, DType to) {
  const MessageLayout layout = MakeMessageLayout(wire.codec, wire.block, 1, numel);
  Bytes message(layout.nbytes + 4);
  QuantizeRef(layout, {from, x, 0, 0}, {message.data(), layout.nbytes, 1, kHash}, nullptr);
  Bytes out(numel * ItemSize(to));
  DecodeRef(layout, {message.data(), layout.nbytes, 1, kHash}, {to, out.data(), 0, 0});
  return out;
}

const std::uint8_t* RowOf(const Case& c, const Bytes& rows, std::size_t row) {
  return rows.data() + row * c.numel * ItemSize(c.input);
}

// A row that is sent without being summed.
Bytes Carried(const Case& c, const std::uint8_t* x) {
  const Wire& first = c.wires[0];
  if (c.wires.size() == 1) return RoundTrip(first, c.input, x, c.numel, c.output);
  const Wire& second = c.wires[1];
  if (first.codec == second.codec && first.block == second.block) {
    return RoundTrip(first, c.input, x, c.numel, c.output);
  }
  const DType between = IsBlockCodec(second.codec) ? DType::kFloat32 : static_cast<DType>(second.codec);
  const Bytes values = RoundTrip(first, c.input, x, c.numel, between);
  return RoundTrip(second, between, values.data(), c.numel, c.output);
}

void AddTo(std::vector<float>* sum, const Bytes& values) {
  const bool is_first = sum->empty();
  if (is_first) sum->resize(values.size() / sizeof(float));
  for (std::size_t i = 0; i < sum->size(); ++i) {
    const float value = LoadElement(DType::kFloat32, values.data(), i);
    (*sum)[i] = is_first ? value : (*sum)[i] + value;
  }
}

Bytes Reduced(const Case& c, const std::vector<Bytes>& inputs, std::size_t row) {
  std::vector<float> sum;
  for (std::size_t node = 0; node < c.num_nodes; ++node) {
    std::vector<float> of_node;
    for (std::size_t local = 0; local < c.num_locals; ++local) {
      const std::uint8_t* x = RowOf(c, inputs[node * c.num_locals + local], row);
      AddTo(&of_node, RoundTrip(c.wires[0], c.input, x, c.numel, DType::kFloat32));
    }
    if (c.wires.size() == 1) {
      sum = of_node;  // one hop: there is one node
    } else {
      const auto* values = reinterpret_cast<const std::uint8_t*>(of_node.data());
      AddTo(&sum, RoundTrip(c.wires[1], DType::kFloat32, values, c.numel, DType::kFloat32));
    }
  }
  Bytes out(c.numel * ItemSize(c.output));
  for (std::size_t i = 0; i < c.numel; ++i) StoreElement(c.output, out.data(), i, sum[i] / c.divisor());
  return out;
}

}  // namespace

std::size_t Case::Row(std::size_t rank) const {
  return is_numbered_local ? rank % num_locals * num_nodes + rank / num_locals : rank;
}

std::string Case::Name() const {
  static const char* const names[] = {"all_gather", "reduce_scatter", "all_to_all"};
  std::string name = names[static_cast<int>(collective)];
  name += " " + std::to_string(num_nodes) + "x" + std::to_string(num_locals) + " codecs";
  for (const Wire& wire : wires) name += " " + std::to_string(static_cast<int>(wire.codec));
  return name + " dtypes " + std::to_string(static_cast<int>(input)) + " " + std::to_string(static_cast<int>(output)) +
         " numel " + std::to_string(numel) + " by " + std::to_string(chunk_numel) +
         (is_numbered_local ? " local" : " rank");
}

std::vector<Bytes> MakeInputs(const Case& c, std::uint32_t seed) {
  std::vector<Bytes> inputs;
  for (std::size_t rank = 0; rank < c.num_ranks(); ++rank) {
    Random random(seed * 64 + static_cast<std::uint32_t>(rank));
    inputs.push_back(MakeArray(c.input, c.input_numel(), Kind::kPlain, &random));
  }
  StoreElement(c.input, inputs.back().data(), 0, std::numeric_limits<float>::quiet_NaN());
  return inputs;
}

Bytes Expected(const Case& c, const std::vector<Bytes>& inputs, std::size_t rank) {
  if (c.collective == Collective::kReduce) return Reduced(c, inputs, c.Row(rank));
  const std::size_t row_nbytes = c.numel * ItemSize(c.output);
  Bytes out(c.num_ranks() * row_nbytes);
  for (std::size_t other = 0; other < c.num_ranks(); ++other) {
    const bool is_gather = c.collective == Collective::kGather;
    const Bytes row = Carried(c, is_gather ? inputs[other].data() : RowOf(c, inputs[other], c.Row(rank)));
    std::memcpy(out.data() + c.Row(other) * row_nbytes, row.data(), row_nbytes);
  }
  return out;
}

}  // namespace zcomm::nccl
