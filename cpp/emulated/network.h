#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "nccl_api.h"

namespace zcomm::emulated {

// Bytes to send to, or to receive from, another rank. Not owned.
struct Part {
  std::uint8_t* data;
  std::size_t nbytes;
};

// One group of sends and receives, which run concurrently; those with one peer are in order.
struct Exchange {
  std::vector<std::deque<Part>> sends;     // by peer
  std::vector<std::deque<Part>> receives;  // by peer
};

// The connections of one communicator: a UNIX socket between any two ranks, whose names are made from the unique id.
//
// Errors are as in NCCL: state() reports the error of an exchange, and the exchange does not return until Abort().
// Thread-safe, except that only one thread may call Connect until it has returned true.
class Network {
 public:
  Network(const std::string& id, std::size_t size, std::size_t rank);
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  // Tries to connect to the ranks that are still missing, without waiting. Returns true when all are connected, or
  // after an error.
  bool Connect();

  // Numbers the exchanges in the order of the calls.
  std::size_t NextNumber();
  // Runs exchange `number` after all those before it. Blocks until it is done or Abort() was called.
  void Run(std::size_t number, Exchange exchange);
  bool is_idle();

  // Ends all exchanges, without results. The other ranks see their connections closed.
  void Abort();
  nccl::Result state();
  std::string error();

 private:
  struct Transfer;

  void Fail(nccl::Result state, const std::string& text);
  bool ConnectTo(std::size_t peer);
  void AcceptAll();
  bool CopyOwn(Exchange* exchange);
  bool Advance(std::vector<Transfer>* transfers);
  bool Send(std::size_t peer, Transfer* transfer);
  bool Receive(std::size_t peer, Transfer* transfer);
  bool CheckLength(std::size_t peer, std::uint64_t sent, std::uint64_t expected);

  const std::string id_;
  const std::size_t rank_;
  std::vector<int> sockets_;  // by peer; -1: none
  int listener_ = -1;

  std::mutex mutex_;  // guards everything below; not held during I/O, which Abort must be able to interrupt
  // num_done_ or is_aborted_ has changed. Exchanges of one communicator may be on several streams, that is threads, but
  // the sockets are byte streams: run out of order, a rank would receive the bytes of another exchange.
  std::condition_variable turn_;
  std::size_t next_number_ = 0;
  std::size_t num_done_ = 0;
  bool is_aborted_ = false;
  nccl::Result state_ = nccl::Result::kSuccess;
  std::string error_;
};

}  // namespace zcomm::emulated
