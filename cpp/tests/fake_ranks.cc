#include "fake_ranks.h"

#include <algorithm>
#include <exception>
#include <thread>

#include "single_rank.h"
#include "test_util.h"

namespace zcomm::nccl {
namespace {

constexpr std::uint8_t kGarbage = 0xEE;

}  // namespace

FakeRanks::FakeRanks(FakeWorld* world, const Case& c, double timeout_s) : world_(world), case_(c) {
  NewRound();
  for (std::size_t rank = 0; rank < c.num_ranks(); ++rank) communicators_.push_back(MakeCommunicator(rank, timeout_s));
}

void FakeRanks::NewRound() {
  const std::vector<Bytes> inputs = MakeInputs(case_, static_cast<std::uint32_t>(rounds_.size()));
  Round round;
  for (std::size_t rank = 0; rank < case_.num_ranks(); ++rank) {
    const Bytes expected = Expected(case_, inputs, rank);
    const Bytes input(inputs[rank].size(), kGarbage);
    const Bytes output(expected.size(), kGarbage);
    round.ranks.push_back({world_->MakeStream(rank), inputs[rank], expected, input, output, output, {}, 1});
  }
  rounds_.push_back(std::move(round));
}

std::unique_ptr<Communicator> FakeRanks::MakeCommunicator(std::size_t rank, double timeout_s) {
  const std::shared_ptr<Device> device = world_->MakeDevice(rank);
  const std::size_t locals = case_.num_locals;
  const std::size_t node = rank / locals;
  const std::size_t local = rank % locals;
  std::vector<std::size_t> of_node;
  std::vector<std::size_t> across;
  for (std::size_t i = 0; i < locals; ++i) of_node.push_back(node * locals + i);
  for (std::size_t i = 0; i < case_.num_nodes; ++i) across.push_back(i * locals + local);
  std::vector<std::unique_ptr<Transport>> hops;
  if (of_node.size() == 1 && case_.wires.size() == 1) {
    hops.push_back(std::make_unique<SingleRank>(device.get()));
  } else {
    hops.push_back(world_->MakeTransport(100 + static_cast<int>(node), of_node, local));
  }
  if (case_.wires.size() == 2) hops.push_back(world_->MakeTransport(200 + static_cast<int>(local), across, node));
  return std::make_unique<Communicator>(device, world_->MakeKernels(rank), std::move(hops),
                                        std::chrono::duration<double>(timeout_s));
}

template <class Use>
void FakeRanks::WithCall(Buffers* buffers, const Use& use) {
  const CallSizes sizes{case_.numel, case_.chunk_numel, case_.wires};
  const auto rows = [&](DType dtype, Bytes* data) -> CallRows {
    if (case_.is_numbered_local) return {dtype, data->data(), case_.num_nodes * case_.numel, case_.numel};
    return {dtype, data->data(), case_.numel, case_.num_locals * case_.numel};
  };
  Bytes* input = &buffers->input;
  Bytes* output = &buffers->output;
  switch (case_.collective) {
    case Collective::kGather:
      return use(GatherCall{sizes, case_.input, input->data(), rows(case_.output, output)});
    case Collective::kReduce:
      return use(ReduceCall{sizes, rows(case_.input, input), case_.output, output->data(), case_.divisor()});
    default:
      return use(ExchangeCall{sizes, rows(case_.input, input), rows(case_.output, output)});
  }
}

std::size_t FakeRanks::WorkspaceNbytes(std::size_t rank) {
  std::size_t nbytes = 0;
  WithCall(&rounds_.back().ranks[rank],
           [&](const auto& call) { nbytes = communicators_[rank]->WorkspaceNbytes(call); });
  return nbytes;
}

void FakeRanks::Call(std::size_t rank) {
  Buffers* of = &rounds_.back().ranks[rank];
  world_->Queue(of->stream, [of] { std::copy(of->source.begin(), of->source.end(), of->input.begin()); });
  WithCall(of, [&](const auto& call) {
    std::uint8_t* workspace = of->workspace.empty() ? nullptr : of->workspace.data();
    communicators_[rank]->Run(call, {of->stream, &of->is_valid, workspace, of->workspace.size()});
  });
  world_->Queue(of->stream, [of] {
    of->result = of->output;
    std::fill(of->input.begin(), of->input.end(), kGarbage);
    std::fill(of->output.begin(), of->output.end(), kGarbage);
  });
}

void FakeRanks::CallAll() {
  std::vector<std::exception_ptr> errors(communicators_.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < communicators_.size(); ++rank) {
    threads.emplace_back([this, rank, &errors] {
      try {
        Call(rank);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

std::string FakeRanks::Difference() const {
  for (const Round& round : rounds_) {
    for (std::size_t rank = 0; rank < round.ranks.size(); ++rank) {
      const Buffers& of = round.ranks[rank];
      const std::string where = case_.Name() + ": rank " + std::to_string(rank);
      if (of.is_valid == 0) return where + " got another message";
      for (std::size_t i = 0; i < case_.output_numel(); ++i) {
        if (!SameElement(case_.output, of.result.data(), of.expected.data(), i)) {
          return where + " element " + std::to_string(i);
        }
      }
    }
  }
  return "";
}

}  // namespace zcomm::nccl
