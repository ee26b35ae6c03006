#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

#include "device.h"

namespace zcomm::nccl {

// Runs a collective as a pipeline: the elements are split into chunks, and one chunk is transferred while its neighbors
// are quantized and decoded. Each stage has its own stream. Events order the streams; the host never waits. No wait is
// redundant: nccl_communicator_test CheckEveryWaitIsNeeded leaves out each in turn and sees wrong bits.
//
//   stage 0, quantize   caller's stream   0 1 2 3
//   stage 1, transfer   stream 1            0 1 2 3       after stage 0 of the chunk
//   stage 2, decode     stream 2              0 1 2 3     after stage 1 of the chunk; the caller's stream waits for it
//
// Invariants:
//   P1  A stage of a chunk runs after the previous stage of that chunk, and after the same stage of the previous chunk.
//       Otherwise it would read a slot that is not yet filled.
//   P2  The workspace has as many slots as there are stages. Chunk c uses slot c % num_slots, once chunk c - num_slots
//       has passed all its stages. Otherwise it would overwrite a message that is still being sent or decoded.
//   P3  Everything queued on the caller's stream before the call runs before it, everything queued later runs after it.
//       So the caller may free memory that belongs to that stream (torch's caching allocator does) once Run returns.
//   P4  Chunks and stages are queued in the same order on all ranks. NCCL matches calls by order: else they deadlock.
inline constexpr std::size_t kMaxStages = 5;

struct Chunk {
  std::size_t index;
  std::size_t begin;  // elements
  std::size_t numel;
  std::uint8_t* slot;  // its part of the workspace
};

struct Stage {
  bool is_transfer;
  std::function<void(const Chunk& chunk, Stream stream)> queue;
};

// What a call does: its stages, and how much workspace a chunk needs.
struct Plan {
  std::vector<Stage> stages;
  std::size_t numel;
  std::size_t chunk_numel;  // of every chunk except the last
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

  // Queues `plan`, whose chunks use `workspace` [plan.workspace_nbytes()], on the device, ordered with `caller` as P3
  // says. If it throws, P3 still holds for the part that was queued, as far as events can still be recorded.
  void Run(const Plan& plan, std::uint8_t* workspace, Stream caller);

 private:
  void QueueStage(const Plan& plan, std::size_t stage, const Chunk& chunk, Stream caller);
  void JoinAll(Stream caller) noexcept;
  void Clear() noexcept;
  Event DoneOf(const Plan& plan, std::size_t stage, std::size_t chunk) const {
    return done_[stage * kMaxStages + chunk % plan.num_slots()];
  }

  Device* device_;
  std::vector<Stream> streams_;  // by stage; that of stage 0 is used only by plans that start with a transfer
  Event start_ = nullptr;
  std::vector<Event> done_;  // [kMaxStages][kMaxStages]: by stage, by slot
};

}  // namespace zcomm::nccl
