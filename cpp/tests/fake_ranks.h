#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "collective_case.h"
#include "communicator.h"
#include "fake_gpu.h"

namespace zcomm::nccl {

// The ranks of a case in a fake world, each with a communicator. A call has its own stream and buffers. Work on that
// stream writes the input just before the call; just after it, the output is copied away and both become garbage.
class FakeRanks {
 public:
  FakeRanks(FakeWorld* world, const Case& c, double timeout_s = 60);

  // Other input, and other streams and buffers, for the calls that follow.
  void NewRound();
  // A call on rank `rank` alone; throws what it throws.
  void Call(std::size_t rank);
  // A call on every rank, each in a thread. Throws the first error.
  void CallAll();
  // Describes the first wrong output of a rank; empty if all are right.
  std::string Difference() const;

  Communicator* communicator(std::size_t rank) { return communicators_[rank].get(); }
  // The stream of the rank's next call.
  Stream stream(std::size_t rank) { return rounds_.back().ranks[rank].stream; }
  void Close(std::size_t rank) { communicators_[rank].reset(); }
  std::size_t WorkspaceNbytes(std::size_t rank);
  // The rank's next call uses a workspace of its own.
  void ProvideWorkspace(std::size_t rank, std::size_t nbytes) { rounds_.back().ranks[rank].workspace.resize(nbytes); }

 private:
  struct Buffers {
    Stream stream;
    Bytes source;
    Bytes expected;
    Bytes input;
    Bytes output;
    Bytes result;
    Bytes workspace;
    std::int32_t is_valid;
  };
  struct Round {
    std::vector<Buffers> ranks;
  };

  std::unique_ptr<Communicator> MakeCommunicator(std::size_t rank, double timeout_s);
  template <class Use>
  void WithCall(Buffers* buffers, const Use& use);

  FakeWorld* world_;
  Case case_;
  std::deque<Round> rounds_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
};

}  // namespace zcomm::nccl
