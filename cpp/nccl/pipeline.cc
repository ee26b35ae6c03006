#include "pipeline.h"

#include <algorithm>
#include <stdexcept>

namespace zcomm::nccl {

Pipeline::Pipeline(Device* device) : device_(device) {
  try {
    for (std::size_t stage = 0; stage < kMaxStages; ++stage) streams_.push_back(device_->CreateStream());
    start_ = device_->CreateEvent();
    for (std::size_t i = 0; i < kMaxStages * kMaxStages; ++i) done_.push_back(device_->CreateEvent());
  } catch (...) {
    Clear();
    throw;
  }
}

Pipeline::~Pipeline() { Clear(); }

void Pipeline::Clear() noexcept {
  for (const Event event : done_) device_->DestroyEvent(event);
  if (start_ != nullptr) device_->DestroyEvent(start_);
  for (const Stream stream : streams_) device_->DestroyStream(stream);
}

void Pipeline::Run(const Plan& plan, std::uint8_t* workspace, Stream caller) {
  const std::size_t num_chunks = plan.num_chunks();
  const std::size_t num_stages = plan.stages.size();
  try {
    for (std::size_t tick = 0; tick < num_chunks + num_stages - 1; ++tick) {
      for (std::size_t stage = 0; stage < num_stages; ++stage) {
        if (stage > tick || tick - stage >= num_chunks) continue;
        const std::size_t index = tick - stage;
        const std::size_t begin = index * plan.chunk_numel;
        QueueStage(plan, stage,
                   {index, begin, std::min(plan.chunk_numel, plan.numel - begin),
                    workspace + index % plan.num_slots() * plan.slot_nbytes},
                   caller);
      }
    }
    // P3. The last chunk's event is enough, as a stream is in order.
    device_->Wait(caller, DoneOf(plan, num_stages - 1, num_chunks - 1));
  } catch (...) {
    JoinAll(caller);
    throw;
  }
}

void Pipeline::QueueStage(const Plan& plan, std::size_t stage, const Chunk& chunk, Stream caller) {
  const bool is_callers = stage == 0 && !plan.stages[0].is_transfer;
  const Stream stream = is_callers ? caller : streams_[stage];
  const std::size_t last = plan.stages.size() - 1;
  if (stage > 0) {
    // P1, between stages. Within a stage, the stream itself keeps the order of chunks.
    device_->Wait(stream, DoneOf(plan, stage - 1, chunk.index));
  } else {
    if (!is_callers && chunk.index == 0) {  // P3: a stream of ours starts after the caller's
      device_->Record(start_, caller);
      device_->Wait(stream, start_);
    }
    // P2: this event was last recorded for the chunk that had the slot before.
    if (last > 0 && chunk.index >= plan.num_slots()) {
      device_->Wait(stream, DoneOf(plan, last, chunk.index));
    }
  }
  plan.stages[stage].queue(chunk, stream);
  device_->Record(DoneOf(plan, stage, chunk.index), stream);
}

// After an error: the caller may free buffers once its stream has passed this point, so it waits for all streams.
void Pipeline::JoinAll(Stream caller) noexcept {
  for (const Stream stream : streams_) {
    try {
      device_->Record(start_, stream);
      device_->Wait(caller, start_);
    } catch (const std::exception&) {  // the caller reports the first error
    }
  }
}

}  // namespace zcomm::nccl
