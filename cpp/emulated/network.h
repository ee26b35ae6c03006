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

// Bytes from or to another rank.
struct Part {
  std::uint8_t* data;
  std::size_t nbytes;
};

// Sends and receives that happen at once; those of a peer in this order.
struct Exchange {
  std::vector<std::deque<Part>> sends;     // by peer
  std::vector<std::deque<Part>> receives;  // by peer
};

// The ranks of one communicator: a UNIX socket between any two, found by names that are made of the unique id.
//
// As NCCL does it: what goes wrong in an exchange is told by state(), and the exchange does not end until Abort().
// Thread-safe.
class Network {
 public:
  Network(const std::string& id, std::size_t size, std::size_t rank);
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  // Looks for ranks that are not connected yet; never waits for one. Returns whether all are there, or it has failed.
  bool Connect();

  // Exchanges run in the order of their numbers, which is the order of the calls.
  std::size_t NextNumber();
  // Blocks until it is done or Abort() was called.
  void Run(std::size_t number, Exchange exchange);
  bool is_idle();

  // Everything under way ends without result; the others find out.
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

  std::mutex mutex_;  // of everything below
  std::condition_variable turn_;
  std::size_t next_number_ = 0;
  std::size_t num_done_ = 0;
  bool is_aborted_ = false;
  nccl::Result state_ = nccl::Result::kSuccess;
  std::string error_;
};

}  // namespace zcomm::emulated
