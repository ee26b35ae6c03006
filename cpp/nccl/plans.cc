#include "plans.h"

#include <algorithm>
#include <utility>

#include "zcomm/check.h"

namespace zcomm::nccl {
namespace {

constexpr std::size_t kAlign = 256;  // alignment of every buffer of a slot

// Allocates the buffers of a slot, one after the other, for a full chunk.
class Slot {
 public:
  std::size_t Add(std::size_t nbytes) {
    const std::size_t offset = nbytes_;
    nbytes_ += (nbytes + kAlign - 1) / kAlign * kAlign;
    return offset;
  }
  std::size_t nbytes() const { return nbytes_; }

 private:
  std::size_t nbytes_ = 0;
};

bool IsPlain(const Wire& wire, DType dtype) { return static_cast<int>(wire.codec) == static_cast<int>(dtype); }

bool IsSameWire(const Wire& a, const Wire& b) {
  return a.codec == b.codec && (a.block == b.block || !IsBlockCodec(a.codec));
}

// The dtype of values between two hops: the second hop's own if it is a cast format, otherwise float32, which is exact.
DType DTypeBetween(const Wire& next) {
  return IsBlockCodec(next.codec) ? DType::kFloat32 : static_cast<DType>(next.codec);
}

// What the stages of a plan share. They hold copies: their functions run after MakePlan has returned.
struct Draft {
  Kernels* kernels;
  std::vector<Transport*> hops;
  CallSizes sizes;
  std::int32_t* is_valid;

  std::size_t num_ranks() const { return hops.size() == 1 ? hops[0]->size() : hops[0]->size() * hops[1]->size(); }
  MessageLayout Layout(std::size_t hop, std::size_t num_segments, std::size_t numel) const {
    return MakeMessageLayout(sizes.wires[hop].codec, sizes.wires[hop].block, num_segments, numel);
  }
  MessageLayout ChunkLayout(std::size_t hop, std::size_t num_segments) const {
    return Layout(hop, num_segments, std::min(sizes.chunk_numel, sizes.numel));
  }
  std::uint32_t Hash(std::size_t hop, const Chunk& chunk) const {
    return sizes.wires[hop].hashes[chunk.begin + chunk.numel == sizes.numel ? 1 : 0];
  }
  // `count` contiguous messages that this rank will receive over `hop`, for the kernel that encodes what the hop sends:
  // it zeroes their trailers (see cuda::Expected; test: CheckShortMessages). Messages of a cast codec have none.
  Expected ExpectedMessages(std::size_t hop, std::uint8_t* data, std::size_t count) const {
    return IsBlockCodec(sizes.wires[hop].codec) ? Expected{data, count} : Expected{};
  }
  // `count` contiguous messages of `layout`.
  MutableMessages Out(const MessageLayout& layout, std::size_t hop, const Chunk& chunk, std::uint8_t* data,
                      std::size_t count) const {
    return {data, layout.nbytes, count, Hash(hop, chunk)};
  }
  ConstMessages In(const MessageLayout& layout, std::size_t hop, const Chunk& chunk, const std::uint8_t* data,
                   std::size_t count) const {
    return {data, layout.nbytes, count, Hash(hop, chunk)};
  }
};

Draft MakeDraft(const CallSizes& sizes, const PlanParts& parts, std::int32_t* is_valid) {
  ZCOMM_CHECK(sizes.numel > 0 && sizes.chunk_numel > 0, "nothing to send: numel=", sizes.numel,
              ", chunk_numel=", sizes.chunk_numel);
  ZCOMM_CHECK(sizes.wires.size() == parts.hops.size(), "each hop must have a wire: wires=", sizes.wires.size(),
              ", hops=", parts.hops.size());
  for (const Wire& wire : sizes.wires) {
    ZCOMM_CHECK(sizes.numel <= sizes.chunk_numel ||
                    (sizes.chunk_numel % 256 == 0 && (wire.block == 0 || sizes.chunk_numel % wire.block == 0)),
                "chunks must be whole blocks: chunk_numel=", sizes.chunk_numel, ", block=", wire.block);
  }
  return {parts.kernels, parts.hops, sizes, is_valid};
}

// Address of element `at` of an array of `dtype`.
std::uint8_t* At(std::uint8_t* data, DType dtype, std::size_t at) { return data + at * ItemSize(dtype); }
const std::uint8_t* At(const std::uint8_t* data, DType dtype, std::size_t at) { return data + at * ItemSize(dtype); }

Plan Finish(const Draft& draft, std::vector<Stage> stages, const Slot& slot) {
  return {std::move(stages), draft.sizes.numel, draft.sizes.chunk_numel, slot.nbytes()};
}

// One hop that sends values unchanged, straight into the output: one transfer of all elements, as there is nothing to
// overlap with it.
Plan PlainGather(Draft draft, const GatherCall& call) {
  const std::size_t item = ItemSize(call.input_dtype);
  draft.sizes.chunk_numel = draft.sizes.numel;
  const auto transfer = [draft, call, item](const Chunk& chunk, Stream stream) {
    draft.hops[0]->Gather(call.input, call.output.data, call.output.local_stride * item, chunk.numel * item, stream);
  };
  return Finish(draft, {{true, transfer}}, Slot());
}

Plan PlainExchange(Draft draft, const ExchangeCall& call) {
  const std::size_t item = ItemSize(call.input.dtype);
  draft.sizes.chunk_numel = draft.sizes.numel;
  const auto transfer = [draft, call, item](const Chunk& chunk, Stream stream) {
    draft.hops[0]->Exchange({call.input.data, call.input.local_stride * item, 0},
                            {call.output.data, call.output.local_stride * item, 0}, chunk.numel * item, 1, stream);
  };
  return Finish(draft, {{true, transfer}}, Slot());
}

// Decodes messages [local ranks][nodes] into their rows: in one launch if the rows have one stride, otherwise in one
// for each local rank.
void DecodeToRows(const Draft& draft, const MessageLayout& layout, std::size_t hop, const Chunk& chunk,
                  const std::uint8_t* messages, std::size_t num_locals, std::size_t num_nodes, const CallRows& rows,
                  Stream stream) {
  std::uint8_t* data = At(rows.data, rows.dtype, chunk.begin);
  if (num_nodes == 1 || rows.local_stride == num_nodes * rows.node_stride) {
    const std::size_t stride = num_nodes == 1 ? rows.local_stride : rows.node_stride;
    draft.kernels->Decode(layout, draft.In(layout, hop, chunk, messages, num_locals * num_nodes),
                          {rows.dtype, data, stride, 0}, draft.is_valid, stream);
    return;
  }
  for (std::size_t local = 0; local < num_locals; ++local) {
    const std::uint8_t* of_local = messages + local * num_nodes * layout.nbytes;
    draft.kernels->Decode(layout, draft.In(layout, hop, chunk, of_local, num_nodes),
                          {rows.dtype, At(data, rows.dtype, local * rows.local_stride), rows.node_stride, 0},
                          draft.is_valid, stream);
  }
}

// An all-gather whose hops carry the same messages, [local ranks][nodes]. With one hop there is one node.
Plan ForwardedGather(const Draft& draft, const GatherCall& call) {
  const bool has_two_hops = draft.hops.size() == 2;
  Transport* const first = draft.hops[0];
  const std::size_t num_nodes = has_two_hops ? first->size() : 1;
  const std::size_t num_locals = has_two_hops ? draft.hops[1]->size() : first->size();
  const std::size_t own_locals = (has_two_hops ? draft.hops[1]->rank() : 0) * num_nodes;  // messages before our row
  Slot slot;
  const std::size_t messages = slot.Add(draft.num_ranks() * draft.ChunkLayout(0, 1).nbytes);
  std::vector<Stage> stages;
  stages.push_back({false, [=](const Chunk& chunk, Stream stream) {
                      const MessageLayout layout = draft.Layout(0, 1, chunk.numel);
                      std::uint8_t* own = chunk.slot + messages + (own_locals + first->rank()) * layout.nbytes;
                      draft.kernels->Quantize(
                          layout, {call.input_dtype, At(call.input, call.input_dtype, chunk.begin), 0, 0},
                          draft.Out(layout, 0, chunk, own, 1),
                          draft.ExpectedMessages(0, chunk.slot + messages, draft.num_ranks()), stream);
                    }});
  stages.push_back({true, [=](const Chunk& chunk, Stream stream) {
                      const std::size_t nbytes = draft.Layout(0, 1, chunk.numel).nbytes;
                      std::uint8_t* row = chunk.slot + messages + own_locals * nbytes;
                      first->Gather(row + first->rank() * nbytes, row, nbytes, nbytes, stream);
                    }});
  if (has_two_hops) {
    stages.push_back({true, [=](const Chunk& chunk, Stream stream) {
                        const std::size_t nbytes = draft.Layout(0, 1, chunk.numel).nbytes;
                        std::uint8_t* all = chunk.slot + messages;
                        draft.hops[1]->Gather(all + own_locals * nbytes, all, num_nodes * nbytes, num_nodes * nbytes,
                                              stream);
                      }});
  }
  stages.push_back({false, [=](const Chunk& chunk, Stream stream) {
                      DecodeToRows(draft, draft.Layout(0, 1, chunk.numel), 0, chunk, chunk.slot + messages, num_locals,
                                   num_nodes, call.output, stream);
                    }});
  return Finish(draft, std::move(stages), slot);
}

// An all-gather that encodes again between its hops. Between nodes, one message for each rank; inside the node, one
// message for each rank with a segment for each node.
Plan RecodedGather(const Draft& draft, const GatherCall& call) {
  Transport* const inter = draft.hops[0];
  Transport* const intra = draft.hops[1];
  const std::size_t nodes = inter->size();
  const DType between = DTypeBetween(draft.sizes.wires[1]);
  const bool is_direct = !IsBlockCodec(draft.sizes.wires[1].codec);
  Slot slot;
  const std::size_t of_nodes = slot.Add(nodes * draft.ChunkLayout(0, 1).nbytes);
  const std::size_t values =
      slot.Add(is_direct ? 0 : nodes * std::min(draft.sizes.chunk_numel, draft.sizes.numel) * ItemSize(between));
  const std::size_t messages = slot.Add(intra->size() * draft.ChunkLayout(1, nodes).nbytes);
  const auto quantize = [=](const Chunk& chunk, Stream stream) {
    const MessageLayout layout = draft.Layout(0, 1, chunk.numel);
    draft.kernels->Quantize(layout, {call.input_dtype, At(call.input, call.input_dtype, chunk.begin), 0, 0},
                            draft.Out(layout, 0, chunk, chunk.slot + of_nodes + inter->rank() * layout.nbytes, 1),
                            draft.ExpectedMessages(0, chunk.slot + of_nodes, nodes), stream);
  };
  const auto gather_nodes = [=](const Chunk& chunk, Stream stream) {
    const std::size_t nbytes = draft.Layout(0, 1, chunk.numel).nbytes;
    std::uint8_t* all = chunk.slot + of_nodes;
    inter->Gather(all + inter->rank() * nbytes, all, nbytes, nbytes, stream);
  };
  const auto recode = [=](const Chunk& chunk, Stream stream) {
    const MessageLayout layout = draft.Layout(0, 1, chunk.numel);
    const MessageLayout inside = draft.Layout(1, nodes, chunk.numel);
    std::uint8_t* own = chunk.slot + messages + intra->rank() * inside.nbytes;
    std::uint8_t* decoded = is_direct ? own : chunk.slot + values;
    draft.kernels->Decode(layout, draft.In(layout, 0, chunk, chunk.slot + of_nodes, nodes),
                          {between, decoded, chunk.numel, 0}, draft.is_valid, stream);
    if (is_direct) return;
    draft.kernels->Quantize(inside, {between, decoded, 0, chunk.numel}, draft.Out(inside, 1, chunk, own, 1),
                            draft.ExpectedMessages(1, chunk.slot + messages, intra->size()), stream);
  };
  const auto gather_locals = [=](const Chunk& chunk, Stream stream) {
    const std::size_t nbytes = draft.Layout(1, nodes, chunk.numel).nbytes;
    std::uint8_t* all = chunk.slot + messages;
    intra->Gather(all + intra->rank() * nbytes, all, nbytes, nbytes, stream);
  };
  const auto decode = [=](const Chunk& chunk, Stream stream) {
    const MessageLayout inside = draft.Layout(1, nodes, chunk.numel);
    const CallRows& rows = call.output;
    draft.kernels->Decode(inside, draft.In(inside, 1, chunk, chunk.slot + messages, intra->size()),
                          {rows.dtype, At(rows.data, rows.dtype, chunk.begin), rows.local_stride, rows.node_stride},
                          draft.is_valid, stream);
  };
  return Finish(
      draft, {{false, quantize}, {true, gather_nodes}, {false, recode}, {true, gather_locals}, {false, decode}}, slot);
}

Plan OneHopReduce(const Draft& draft, const ReduceCall& call) {
  Transport* const hop = draft.hops[0];
  const bool is_plain = IsPlain(draft.sizes.wires[0], call.input.dtype);
  const std::size_t room = hop->size() * draft.ChunkLayout(0, 1).nbytes;
  Slot slot;
  const std::size_t sending = slot.Add(is_plain ? 0 : room);
  const std::size_t received = slot.Add(room);
  const CallRows& rows = call.input;
  const auto quantize = [=](const Chunk& chunk, Stream stream) {
    const MessageLayout layout = draft.Layout(0, 1, chunk.numel);
    draft.kernels->Quantize(layout, {rows.dtype, At(rows.data, rows.dtype, chunk.begin), rows.local_stride, 0},
                            draft.Out(layout, 0, chunk, chunk.slot + sending, hop->size()),
                            draft.ExpectedMessages(0, chunk.slot + received, hop->size()), stream);
  };
  const auto transfer = [=](const Chunk& chunk, Stream stream) {
    const std::size_t nbytes = draft.Layout(0, 1, chunk.numel).nbytes;
    const Parts sent = is_plain
                           ? Parts{At(rows.data, rows.dtype, chunk.begin), rows.local_stride * ItemSize(rows.dtype), 0}
                           : Parts{chunk.slot + sending, nbytes, 0};
    hop->Exchange(sent, {chunk.slot + received, nbytes, 0}, nbytes, 1, stream);
  };
  const auto sum = [=](const Chunk& chunk, Stream stream) {
    const MessageLayout layout = draft.Layout(0, 1, chunk.numel);
    draft.kernels->DecodeSum(layout, draft.In(layout, 0, chunk, chunk.slot + received, hop->size()),
                             {call.output_dtype, At(call.output, call.output_dtype, chunk.begin), 0, 0}, call.divisor,
                             draft.is_valid, stream);
  };
  std::vector<Stage> stages = {{true, transfer}, {false, sum}};
  if (!is_plain) stages.insert(stages.begin(), Stage{false, quantize});
  return Finish(draft, std::move(stages), slot);
}

// A reduce-scatter over two hops. Inside the node, one message for each local rank with a segment for each node;
// between nodes, one message for each node.
Plan TwoHopReduce(const Draft& draft, const ReduceCall& call) {
  Transport* const intra = draft.hops[0];
  Transport* const inter = draft.hops[1];
  const std::size_t nodes = inter->size();
  const CallRows& rows = call.input;
  Slot slot;
  const std::size_t room = intra->size() * draft.ChunkLayout(0, nodes).nbytes;
  const std::size_t room_between = nodes * draft.ChunkLayout(1, 1).nbytes;
  const std::size_t sending = slot.Add(room);
  const std::size_t received = slot.Add(room);
  const std::size_t partial = slot.Add(room_between);
  const std::size_t received_between = slot.Add(room_between);
  const auto quantize = [=](const Chunk& chunk, Stream stream) {
    const MessageLayout layout = draft.Layout(0, nodes, chunk.numel);
    draft.kernels->Quantize(layout,
                            {rows.dtype, At(rows.data, rows.dtype, chunk.begin), rows.local_stride, rows.node_stride},
                            draft.Out(layout, 0, chunk, chunk.slot + sending, intra->size()),
                            draft.ExpectedMessages(0, chunk.slot + received, intra->size()), stream);
  };
  const auto inside = [=](const Chunk& chunk, Stream stream) {
    const std::size_t nbytes = draft.Layout(0, nodes, chunk.numel).nbytes;
    intra->Exchange({chunk.slot + sending, nbytes, 0}, {chunk.slot + received, nbytes, 0}, nbytes, 1, stream);
  };
  const auto requantize = [=](const Chunk& chunk, Stream stream) {
    const MessageLayout layout = draft.Layout(0, nodes, chunk.numel);
    const MessageLayout between = draft.Layout(1, 1, chunk.numel);
    draft.kernels->DecodeSumRequantize(layout, draft.In(layout, 0, chunk, chunk.slot + received, intra->size()),
                                       between, draft.Out(between, 1, chunk, chunk.slot + partial, nodes),
                                       draft.ExpectedMessages(1, chunk.slot + received_between, nodes), draft.is_valid,
                                       stream);
  };
  const auto across = [=](const Chunk& chunk, Stream stream) {
    const std::size_t nbytes = draft.Layout(1, 1, chunk.numel).nbytes;
    inter->Exchange({chunk.slot + partial, nbytes, 0}, {chunk.slot + received_between, nbytes, 0}, nbytes, 1, stream);
  };
  const auto sum = [=](const Chunk& chunk, Stream stream) {
    const MessageLayout between = draft.Layout(1, 1, chunk.numel);
    draft.kernels->DecodeSum(between, draft.In(between, 1, chunk, chunk.slot + received_between, nodes),
                             {call.output_dtype, At(call.output, call.output_dtype, chunk.begin), 0, 0}, call.divisor,
                             draft.is_valid, stream);
  };
  return Finish(draft, {{false, quantize}, {true, inside}, {false, requantize}, {true, across}, {false, sum}}, slot);
}

Plan OneHopExchange(const Draft& draft, const ExchangeCall& call) {
  Transport* const hop = draft.hops[0];
  const CallRows& rows = call.input;
  Slot slot;
  const std::size_t room = hop->size() * draft.ChunkLayout(0, 1).nbytes;
  const std::size_t sending = slot.Add(room);
  const std::size_t received = slot.Add(room);
  const auto quantize = [=](const Chunk& chunk, Stream stream) {
    const MessageLayout layout = draft.Layout(0, 1, chunk.numel);
    draft.kernels->Quantize(layout, {rows.dtype, At(rows.data, rows.dtype, chunk.begin), rows.local_stride, 0},
                            draft.Out(layout, 0, chunk, chunk.slot + sending, hop->size()),
                            draft.ExpectedMessages(0, chunk.slot + received, hop->size()), stream);
  };
  const auto transfer = [=](const Chunk& chunk, Stream stream) {
    const std::size_t nbytes = draft.Layout(0, 1, chunk.numel).nbytes;
    hop->Exchange({chunk.slot + sending, nbytes, 0}, {chunk.slot + received, nbytes, 0}, nbytes, 1, stream);
  };
  const auto decode = [=](const Chunk& chunk, Stream stream) {
    DecodeToRows(draft, draft.Layout(0, 1, chunk.numel), 0, chunk, chunk.slot + received, hop->size(), 1, call.output,
                 stream);
  };
  return Finish(draft, {{false, quantize}, {true, transfer}, {false, decode}}, slot);
}

// Quantizes rows into messages [local ranks][nodes], in one launch for each local rank.
void QuantizeByLocal(const Draft& draft, const MessageLayout& layout, const Chunk& chunk, const CallRows& rows,
                     std::uint8_t* messages, const Expected& expected, Stream stream) {
  const std::size_t nodes = draft.hops[1]->size();
  const std::uint8_t* data = At(rows.data, rows.dtype, chunk.begin);
  for (std::size_t local = 0; local < draft.hops[0]->size(); ++local) {
    draft.kernels->Quantize(layout, {rows.dtype, At(data, rows.dtype, local * rows.local_stride), rows.node_stride, 0},
                            draft.Out(layout, 0, chunk, messages + local * nodes * layout.nbytes, nodes),
                            local == 0 ? expected : Expected{}, stream);
  }
}

// An all-to-all over two hops. Inside the node, messages go to the local rank of their destination, as
// [local ranks][nodes] both when sent and when received. Between nodes, those of all local ranks go on, as
// [nodes][local ranks].
Plan TwoHopExchange(const Draft& draft, const ExchangeCall& call) {
  Transport* const intra = draft.hops[0];
  Transport* const inter = draft.hops[1];
  const std::size_t nodes = inter->size();
  const std::size_t locals = intra->size();
  const bool is_forwarded = IsSameWire(draft.sizes.wires[0], draft.sizes.wires[1]);
  const DType between = DTypeBetween(draft.sizes.wires[1]);
  const bool is_direct = !IsBlockCodec(draft.sizes.wires[1].codec);
  const std::size_t count = nodes * locals;
  Slot slot;
  const std::size_t sending = slot.Add(count * draft.ChunkLayout(0, 1).nbytes);
  // If messages are forwarded, the second hop's receive buffer follows the first's, so that one launch zeroes the
  // trailers of both.
  const std::size_t received = slot.Add((is_forwarded ? 2 : 1) * count * draft.ChunkLayout(0, 1).nbytes);
  const std::size_t chunk_numel = std::min(draft.sizes.chunk_numel, draft.sizes.numel);
  const std::size_t values = slot.Add(is_forwarded || is_direct ? 0 : count * chunk_numel * ItemSize(between));
  const std::size_t recoded = slot.Add(is_forwarded ? 0 : count * draft.ChunkLayout(1, 1).nbytes);
  const std::size_t last = slot.Add(is_forwarded ? 0 : count * draft.ChunkLayout(1, 1).nbytes);
  const auto arrived = [=](const Chunk& chunk) {
    return chunk.slot + (is_forwarded ? received + count * draft.Layout(0, 1, chunk.numel).nbytes : last);
  };
  const auto quantize = [=](const Chunk& chunk, Stream stream) {
    const MessageLayout layout = draft.Layout(0, 1, chunk.numel);
    QuantizeByLocal(draft, layout, chunk, call.input, chunk.slot + sending,
                    draft.ExpectedMessages(0, chunk.slot + received, is_forwarded ? 2 * count : count), stream);
  };
  const auto inside = [=](const Chunk& chunk, Stream stream) {
    const std::size_t nbytes = nodes * draft.Layout(0, 1, chunk.numel).nbytes;
    intra->Exchange({chunk.slot + sending, nbytes, 0}, {chunk.slot + received, nbytes, 0}, nbytes, 1, stream);
  };
  const auto recode = [=](const Chunk& chunk, Stream stream) {
    if (is_forwarded) return;
    const MessageLayout layout = draft.Layout(0, 1, chunk.numel);
    const MessageLayout next = draft.Layout(1, 1, chunk.numel);
    std::uint8_t* decoded = chunk.slot + (is_direct ? recoded : values);
    for (std::size_t local = 0; local < locals; ++local) {
      draft.kernels->Decode(
          layout, draft.In(layout, 0, chunk, chunk.slot + received + local * nodes * layout.nbytes, nodes),
          {between, At(decoded, between, local * chunk.numel), locals * chunk.numel, 0}, draft.is_valid, stream);
    }
    if (is_direct) return;
    draft.kernels->Quantize(next, {between, decoded, chunk.numel, 0},
                            draft.Out(next, 1, chunk, chunk.slot + recoded, count),
                            draft.ExpectedMessages(1, arrived(chunk), count), stream);
  };
  const auto across = [=](const Chunk& chunk, Stream stream) {
    const std::size_t nbytes = draft.Layout(1, 1, chunk.numel).nbytes;
    const Parts to = {arrived(chunk), locals * nbytes, nbytes};
    if (is_forwarded) {
      inter->Exchange({chunk.slot + received, nbytes, nodes * nbytes}, to, nbytes, locals, stream);
    } else {
      inter->Exchange({chunk.slot + recoded, locals * nbytes, 0}, {to.data, to.stride_nbytes, 0}, locals * nbytes, 1,
                      stream);
    }
  };
  const auto decode = [=](const Chunk& chunk, Stream stream) {
    const CallRows& rows = call.output;  // in rank order, which is [nodes][local ranks]
    DecodeToRows(draft, draft.Layout(1, 1, chunk.numel), 1, chunk, arrived(chunk), count, 1,
                 {rows.dtype, rows.data, rows.local_stride, 0}, stream);
  };
  return Finish(draft, {{false, quantize}, {true, inside}, {false, recode}, {true, across}, {false, decode}}, slot);
}

Plan Bytes(Transport* hop, const BytesCall& call) {
  const auto transfer = [=](const Chunk& chunk, Stream stream) {
    if (call.is_gather) return hop->Gather(call.input, call.output, call.stride_nbytes, chunk.numel, stream);
    hop->Exchange({call.input, call.nbytes, 0}, {call.output, call.stride_nbytes, 0}, chunk.numel, 1, stream);
  };
  return {{{false, transfer}}, call.nbytes, call.nbytes, 0};
}

}  // namespace

Plan MakePlan(const BytesCall& call, const PlanParts& parts, std::int32_t* /*is_valid*/) {
  ZCOMM_CHECK(call.hop < parts.hops.size(), "no such hop: hop=", call.hop, ", hops=", parts.hops.size());
  ZCOMM_CHECK(call.nbytes > 0, "nothing to send: nbytes=0");
  return Bytes(parts.hops[call.hop], call);
}

Plan MakePlan(const GatherCall& call, const PlanParts& parts, std::int32_t* is_valid) {
  Draft draft = MakeDraft(call.sizes, parts, is_valid);
  // Between nodes first: each shard then crosses the slow link once for each node, and not once for each rank.
  std::reverse(draft.hops.begin(), draft.hops.end());
  const std::vector<Wire>& wires = call.sizes.wires;
  if (wires.size() == 1 && IsPlain(wires[0], call.input_dtype) && call.input_dtype == call.output.dtype) {
    return PlainGather(draft, call);
  }
  if (wires.size() == 1 || IsSameWire(wires[0], wires[1])) return ForwardedGather(draft, call);
  return RecodedGather(draft, call);
}

Plan MakePlan(const ReduceCall& call, const PlanParts& parts, std::int32_t* is_valid) {
  const Draft draft = MakeDraft(call.sizes, parts, is_valid);
  return call.sizes.wires.size() == 1 ? OneHopReduce(draft, call) : TwoHopReduce(draft, call);
}

Plan MakePlan(const ExchangeCall& call, const PlanParts& parts, std::int32_t* is_valid) {
  const Draft draft = MakeDraft(call.sizes, parts, is_valid);
  if (call.sizes.wires.size() == 2) return TwoHopExchange(draft, call);
  const bool is_plain = IsPlain(call.sizes.wires[0], call.input.dtype) && call.input.dtype == call.output.dtype;
  return is_plain ? PlainExchange(draft, call) : OneHopExchange(draft, call);
}

}  // namespace zcomm::nccl
