#include "host_stream.h"

#include <chrono>
#include <memory>
#include <set>
#include <utility>
#include <vector>

namespace zcomm::nccl {
namespace {

// The streams of this process. Never destroyed: a stream may be destroyed after static objects, and must find it.
struct Streams {
  std::mutex mutex;
  std::set<HostStream*> all;
};

Streams& AllStreams() {
  static Streams* const streams = new Streams;
  return *streams;
}

}  // namespace

void HostEvent::Record(WorkStream* stream) {
  const auto promise = std::make_shared<std::promise<void>>();
  done = promise->get_future().share();
  stream->Queue([promise] { promise->set_value(); });
}

void HostEvent::Wait() const {
  if (done.valid()) done.wait();
}

bool HostEvent::IsDone() const {
  return !done.valid() || done.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

HostStream::HostStream() {
  const std::lock_guard<std::mutex> lock(AllStreams().mutex);
  AllStreams().all.insert(this);
}

HostStream::~HostStream() {
  // Out of the set first: WaitForAll must not record an event on a stream that no longer runs it, a deadlock.
  {
    const std::lock_guard<std::mutex> lock(AllStreams().mutex);
    AllStreams().all.erase(this);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closing_ = true;
  }
  more_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void HostStream::Queue(std::function<void()> work) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { Serve(); });
    queue_.push_back(std::move(work));
  }
  more_.notify_all();
}

void HostStream::WaitForAll() {
  std::vector<HostEvent> ends;
  {
    const std::lock_guard<std::mutex> lock(AllStreams().mutex);
    for (HostStream* stream : AllStreams().all) {
      ends.emplace_back();
      ends.back().Record(stream);
    }
  }
  for (const HostEvent& end : ends) end.Wait();
}

void HostStream::Serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    more_.wait(lock, [this] { return is_closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    work();
    work = nullptr;  // free what it holds outside the lock, and before the next work runs
    lock.lock();
  }
}

}  // namespace zcomm::nccl
