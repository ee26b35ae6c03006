#pragma once

#include <string>
#include <vector>

#include "plans.h"
#include "zcomm/arrays.h"

namespace zcomm::nccl {

enum class Collective { kGather, kReduce, kExchange };

// One call of a collective, the same on every rank, over one hop or over two.
struct Case {
  Collective collective;
  std::size_t num_nodes;  // 1 with one hop
  std::size_t num_locals;
  std::vector<Wire> wires;  // in the order of the hops
  DType input;
  DType output;
  std::size_t numel;
  std::size_t chunk_numel;
  bool is_numbered_local;

  std::size_t num_ranks() const { return num_nodes * num_locals; }
  std::size_t input_numel() const { return collective == Collective::kGather ? numel : num_ranks() * numel; }
  std::size_t output_numel() const { return collective == Collective::kReduce ? numel : num_ranks() * numel; }
  std::size_t Row(std::size_t rank) const;
  float divisor() const { return static_cast<float>(num_ranks()); }
  std::string Name() const;
};

using Bytes = std::vector<std::uint8_t>;

// Every rank's input.
std::vector<Bytes> MakeInputs(const Case& c, std::uint32_t seed);

// The expected output of `rank`, computed from whole rows by the scalar reference, without chunks, exchanges or
// messages for several ranks.
Bytes Expected(const Case& c, const std::vector<Bytes>& inputs, std::size_t rank);

}  // namespace zcomm::nccl
