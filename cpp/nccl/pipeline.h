#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

#include "device.h"

namespace zcomm::nccl {

// One message's way through its stages, cut into chunks, so that a stage of one chunk overlaps the others of its
// neighbours. Each stage has a stream of its own; events order them, the host waits for nothing.
//
//   stage 0, quantize   caller's stream   0 1 2 3
//   stage 1, transfer   stream 1            0 1 2 3       after stage 0 of the chunk
//   stage 2, decode     stream 2              0 1 2 3     after stage 1 of the chunk; then the caller's stream goes on
//
// Invariants:
//   P1  A stage of a chunk runs after the stage before it of the same chunk, and after itself of the chunk before.
//   P2  The workspace has as many slots as there are stages. Chunk c uses slot c % num_slots, once chunk c - num_slots
//       has been through all its stages.
//   P3  All that was queued on the caller's stream goes before, all that will be queued there after. So memory that
//       belongs to that stream may be given back as soon as the call has returned.
//   P4  Chunks and stages are queued in the same order on all ranks.
inline constexpr std::size_t kMaxStages = 5;

struct Chunk {
  std::size_t index;
  std::size_t begin;  // elements
  std::size_t numel;
  std::uint8_t* slot;  // room of its own in the workspace
};

struct Stage {
  bool is_transfer;
  std::function<void(const Chunk& chunk, Stream stream)> queue;
};

// What a call does: its stages, and how much room a chunk needs.
struct Plan {
  std::vector<Stage> stages;
  std::size_t numel;
  std::size_t chunk_numel;  // of every chunk but the last
  std::size_t slot_nbytes;

  std::size_t num_chunks() const { return (numel + chunk_numel - 1) / chunk_numel; }
  std::size_t num_slots() const { return stages.size(); }
  std::size_t workspace_nbytes() const { return slot_nbytes * std::min(num_chunks(), num_slots()); }
};

class Pipeline {
 public:
  explicit Pipeline(Device* device);
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // Queues all of `plan`, whose chunks use `workspace`. When it throws, what was queued up to then goes before what
  // will be queued on `caller`, as far as events can still be recorded.
  void Run(const Plan& plan, std::uint8_t* workspace, Stream caller);

 private:
  void QueueStage(const Plan& plan, std::size_t stage, const Chunk& chunk, Stream caller);
  void JoinAll(Stream caller) noexcept;
  void Clear() noexcept;
  Event DoneOf(const Plan& plan, std::size_t stage, std::size_t chunk) const {
    return done_[stage * kMaxStages + chunk % plan.num_slots()];
  }

  Device* device_;
  std::vector<Stream> streams_;  // by stage; that of stage 0 is for plans that begin with a transfer
  Event start_ = nullptr;
  std::vector<Event> done_;  // [kMaxStages][kMaxStages]: by stage, by slot
};

}  // namespace zcomm::nccl
