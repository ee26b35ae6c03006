#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device.h"
#include "pipeline.h"

namespace zcomm::nccl {

// How a hop carries values. `hashes`: of the message layout of a chunk, and of the last chunk; 0 for cast codecs.
struct Wire {
  Codec codec;
  std::size_t block;
  std::uint32_t hashes[2];
};

// Rows of a call, one of `numel` elements for each rank, strides in elements: that of rank l of node n begins at
// data + l * local_stride + n * node_stride. With one hop: l is the rank, and n is 0.
struct CallRows {
  DType dtype;
  std::uint8_t* data;
  std::size_t local_stride;
  std::size_t node_stride;
};

// All collectives: `numel` elements a rank, a wire for each hop in the order in which the call uses them, chunks of
// `chunk_numel` elements, a multiple of both blocks and of 256.
struct CallSizes {
  std::size_t numel;
  std::size_t chunk_numel;
  std::vector<Wire> wires;
};

// Every rank's shard [numel] to all. Two hops: between nodes, then inside the node; with the same wire on both, bytes
// are forwarded, else decoded and encoded again.
struct GatherCall {
  CallSizes sizes;
  DType input_dtype;
  const std::uint8_t* input;
  CallRows output;
};

// The sum of row r of every rank's input, over `divisor`, to rank r. Two hops: inside the node, then between nodes.
struct ReduceCall {
  CallSizes sizes;
  CallRows input;
  DType output_dtype;
  std::uint8_t* output;
  float divisor;
};

// Row r of the input to rank r. Two hops: inside the node, then between nodes.
struct ExchangeCall {
  CallSizes sizes;
  CallRows input;
  CallRows output;
};

// Bytes as they are, over hop number `hop` alone: `input` [nbytes] of rank i to output + i * stride_nbytes of every
// rank, or, unless `is_gather`, part i of `input` [size, nbytes] to rank i. On the caller's stream itself.
struct BytesCall {
  std::size_t hop;
  bool is_gather;
  std::uint8_t* input;
  std::uint8_t* output;
  std::size_t stride_nbytes;
  std::size_t nbytes;
};

// On which stream a call is queued, and where it finds room.
struct Place {
  Stream stream;
  std::int32_t* is_valid;   // becomes 0 where a message is not what was to come; device memory or null
  std::uint8_t* workspace;  // null: the communicator's
  std::size_t workspace_nbytes;
};

// Who does the work of a plan. Two hops: inside the node, between nodes.
struct PlanParts {
  Kernels* kernels;
  std::vector<Transport*> hops;
};

// Throw std::invalid_argument where sizes, wires and hops do not fit.
Plan MakePlan(const GatherCall& call, const PlanParts& parts, std::int32_t* is_valid = nullptr);
Plan MakePlan(const ReduceCall& call, const PlanParts& parts, std::int32_t* is_valid = nullptr);
Plan MakePlan(const ExchangeCall& call, const PlanParts& parts, std::int32_t* is_valid = nullptr);
Plan MakePlan(const BytesCall& call, const PlanParts& parts, std::int32_t* is_valid = nullptr);

}  // namespace zcomm::nccl
