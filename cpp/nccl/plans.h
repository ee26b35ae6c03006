#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device.h"
#include "pipeline.h"

namespace zcomm::nccl {

// The wire format of a hop. `hashes`: the layout hashes of a chunk and of the last chunk; 0 for cast codecs.
struct Wire {
  Codec codec;
  std::size_t block;
  std::uint32_t hashes[2];
};

// Rows of a call, one of `numel` elements for each rank. That of local rank l of node n starts at element
// l * local_stride + n * node_stride. With one hop, l is the rank and n is 0. Not owned.
struct CallRows {
  DType dtype;
  std::uint8_t* data;
  std::size_t local_stride;
  std::size_t node_stride;
};

// Sizes of a collective: `numel` elements for each rank, in chunks of `chunk_numel` elements, which is a multiple of
// all blocks and of 256; one wire for each hop, in the order in which the call uses the hops.
struct CallSizes {
  std::size_t numel;
  std::size_t chunk_numel;
  std::vector<Wire> wires;
};

// An all-gather: every rank's shard [numel] to all ranks. Two hops: between nodes, then inside the node. If both hops
// have the same wire, messages are forwarded; otherwise they are decoded and encoded again.
struct GatherCall {
  CallSizes sizes;
  DType input_dtype;
  const std::uint8_t* input;
  CallRows output;
};

// A reduce-scatter: rank r receives the sum of row r of all ranks' inputs, divided by `divisor`. Two hops: inside the
// node, then between nodes.
struct ReduceCall {
  CallSizes sizes;
  CallRows input;
  DType output_dtype;
  std::uint8_t* output;
  float divisor;
};

// An all-to-all: sends row r of the input to rank r. Two hops: inside the node, then between nodes.
struct ExchangeCall {
  CallSizes sizes;
  CallRows input;
  CallRows output;
};

// Sends bytes unchanged over one hop. With `is_gather`, `input` [nbytes] of rank i goes to output + i * stride_nbytes
// on every rank; otherwise part i of `input` [size, nbytes] goes to rank i.
struct BytesCall {
  std::size_t hop;
  bool is_gather;
  std::uint8_t* input;
  std::uint8_t* output;
  std::size_t stride_nbytes;
  std::size_t nbytes;
};

// Where a call runs: its stream and its workspace.
struct Place {
  Stream stream;
  std::int32_t* is_valid;   // becomes 0 if a message has the wrong hash; device memory or null
  std::uint8_t* workspace;  // null: the communicator's own
  std::size_t workspace_nbytes;
};

// What a plan calls. Two hops: inside the node, then between nodes.
struct PlanParts {
  Kernels* kernels;
  std::vector<Transport*> hops;
};

// Throw std::invalid_argument if sizes, wires and hops do not fit together. A plan refers to `parts` and to the call's
// buffers, which must outlive its work on the device.
Plan MakePlan(const GatherCall& call, const PlanParts& parts, std::int32_t* is_valid = nullptr);
Plan MakePlan(const ReduceCall& call, const PlanParts& parts, std::int32_t* is_valid = nullptr);
Plan MakePlan(const ExchangeCall& call, const PlanParts& parts, std::int32_t* is_valid = nullptr);
Plan MakePlan(const BytesCall& call, const PlanParts& parts, std::int32_t* is_valid = nullptr);

}  // namespace zcomm::nccl
