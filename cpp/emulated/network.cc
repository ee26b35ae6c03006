#include "network.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace zcomm::emulated {
namespace {

using nccl::Result;

constexpr int kPollMs = 10;  // an abort takes effect after at most this long

// The address of a rank, in Linux's abstract namespace: it disappears with its sockets, even after a crash.
socklen_t Name(const std::string& id, std::size_t rank, sockaddr_un* address) {
  const std::string text = "zcomm-nccl-" + id + "-" + std::to_string(rank);
  *address = {};
  address->sun_family = AF_UNIX;
  std::copy(text.begin(), text.end(), address->sun_path + 1);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
}

bool IsAgain() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

// What is left to send to and to receive from one peer. Each part is preceded by its length, 8 bytes; `sent` and
// `received` count the bytes of the first part that are done, those 8 included.
struct Network::Transfer {
  std::deque<Part> sends;
  std::deque<Part> receives;
  std::size_t sent = 0;
  std::size_t received = 0;
  std::uint64_t length = 0;  // of the part that is being received, as the sender announced it

  bool is_done() const { return sends.empty() && receives.empty(); }
};

Network::Network(const std::string& id, std::size_t size, std::size_t rank) : id_(id), rank_(rank), sockets_(size, -1) {
  sockaddr_un address;
  const socklen_t length = Name(id, rank, &address);
  listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (listener_ < 0 || bind(listener_, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(listener_, static_cast<int>(size)) != 0) {
    Fail(Result::kSystemError, "rank " + std::to_string(rank) + " cannot listen: " + std::strerror(errno));
  }
}

Network::~Network() {
  for (const int socket : sockets_) {
    if (socket >= 0) close(socket);
  }
  if (listener_ >= 0) close(listener_);
}

bool Network::Connect() {
  if (state() != Result::kSuccess || listener_ < 0) return true;
  // This rank connects to the lower ranks and accepts the higher ones: one socket for each pair.
  bool is_complete = true;
  for (std::size_t peer = 0; peer < rank_; ++peer) is_complete = ConnectTo(peer) && is_complete;
  AcceptAll();
  is_complete = is_complete && std::none_of(sockets_.begin() + static_cast<std::ptrdiff_t>(rank_) + 1, sockets_.end(),
                                            [](int socket) { return socket < 0; });
  if (is_complete) close(std::exchange(listener_, -1));
  return is_complete || state() != Result::kSuccess;
}

bool Network::ConnectTo(std::size_t peer) {
  if (sockets_[peer] >= 0) return true;
  sockaddr_un address;
  const socklen_t length = Name(id_, peer, &address);
  const int found = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const std::uint64_t own = rank_;
  if (found < 0 || connect(found, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      send(found, &own, sizeof(own), MSG_NOSIGNAL) != sizeof(own)) {
    if (found >= 0) close(found);
    return false;  // it does not listen yet
  }
  sockets_[peer] = found;
  return true;
}

void Network::AcceptAll() {
  for (int found; (found = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC)) >= 0;) {
    std::uint64_t peer = 0;
    const bool has_rank = recv(found, &peer, sizeof(peer), MSG_WAITALL) == sizeof(peer);
    if (has_rank && peer > rank_ && peer < sockets_.size() && sockets_[peer] < 0) {
      sockets_[peer] = found;
    } else {
      close(found);
      Fail(Result::kInvalidUsage, "an unexpected rank connected, or one connected twice: rank=" + std::to_string(peer));
    }
  }
}

std::size_t Network::NextNumber() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return next_number_++;
}

void Network::Run(std::size_t number, Exchange exchange) {
  std::unique_lock<std::mutex> lock(mutex_);
  turn_.wait(lock, [&] { return num_done_ == number; });
  if (!is_aborted_) {
    lock.unlock();
    std::vector<Transfer> transfers(sockets_.size());
    bool is_ok = CopyOwn(&exchange);
    for (std::size_t peer = 0; peer < sockets_.size(); ++peer) {
      transfers[peer].sends = std::move(exchange.sends[peer]);
      transfers[peer].receives = std::move(exchange.receives[peer]);
    }
    is_ok = is_ok && Advance(&transfers);
    lock.lock();
    if (!is_ok) turn_.wait(lock, [this] { return is_aborted_; });
  }
  ++num_done_;
  turn_.notify_all();
}

// Copies what this rank sends to itself, and removes it from the exchange.
bool Network::CopyOwn(Exchange* exchange) {
  std::deque<Part>& sends = exchange->sends[rank_];
  std::deque<Part>& receives = exchange->receives[rank_];
  if (sends.size() != receives.size()) {
    Fail(Result::kInvalidUsage, "a rank must receive what it sends to itself: sends=" + std::to_string(sends.size()) +
                                    ", receives=" + std::to_string(receives.size()));
    return false;
  }
  for (; !sends.empty(); sends.pop_front(), receives.pop_front()) {
    if (!CheckLength(rank_, sends.front().nbytes, receives.front().nbytes)) return false;
    std::memcpy(receives.front().data, sends.front().data, sends.front().nbytes);
  }
  return true;
}

// Sends and receives with all peers concurrently: ranks that only sent, until their sockets' buffers are full, would
// deadlock. Returns false after an error or an abort.
bool Network::Advance(std::vector<Transfer>* transfers) {
  for (;;) {
    std::vector<pollfd> waiting;
    for (std::size_t peer = 0; peer < transfers->size(); ++peer) {
      Transfer& transfer = (*transfers)[peer];
      if (transfer.is_done()) continue;
      if (!Send(peer, &transfer) || !Receive(peer, &transfer)) return false;
      if (transfer.is_done()) continue;
      const int events = (transfer.sends.empty() ? 0 : POLLOUT) | (transfer.receives.empty() ? 0 : POLLIN);
      waiting.push_back({sockets_[peer], static_cast<short>(events), 0});
    }
    if (waiting.empty()) return true;
    poll(waiting.data(), waiting.size(), kPollMs);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_aborted_) return false;
  }
}

bool Network::Send(std::size_t peer, Transfer* transfer) {
  while (!transfer->sends.empty()) {
    const Part& part = transfer->sends.front();
    const std::uint64_t length = part.nbytes;
    const bool is_length = transfer->sent < sizeof(length);
    const std::uint8_t* from = is_length ? reinterpret_cast<const std::uint8_t*>(&length) + transfer->sent
                                         : part.data + (transfer->sent - sizeof(length));
    const std::size_t left = (is_length ? sizeof(length) : sizeof(length) + part.nbytes) - transfer->sent;
    const ssize_t count = left == 0 ? 0 : send(sockets_[peer], from, left, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0) {
      if (IsAgain()) return true;
      Fail(Result::kRemoteError, "rank " + std::to_string(peer) + " disconnected: " + std::strerror(errno));
      return false;
    }
    transfer->sent += static_cast<std::size_t>(count);
    if (transfer->sent == sizeof(length) + part.nbytes) {
      transfer->sends.pop_front();
      transfer->sent = 0;
    }
  }
  return true;
}

bool Network::Receive(std::size_t peer, Transfer* transfer) {
  while (!transfer->receives.empty()) {
    const Part& part = transfer->receives.front();
    std::uint64_t& length = transfer->length;
    const bool is_length = transfer->received < sizeof(length);
    std::uint8_t* to = is_length ? reinterpret_cast<std::uint8_t*>(&length) + transfer->received
                                 : part.data + (transfer->received - sizeof(length));
    const std::size_t left = (is_length ? sizeof(length) : sizeof(length) + part.nbytes) - transfer->received;
    const ssize_t count = left == 0 ? 0 : recv(sockets_[peer], to, left, MSG_DONTWAIT);
    if (count < 0 && IsAgain()) return true;
    if (count < 0 || (count == 0 && left > 0)) {
      Fail(Result::kRemoteError, "rank " + std::to_string(peer) + " disconnected");
      return false;
    }
    transfer->received += static_cast<std::size_t>(count);
    if (transfer->received == sizeof(length) && !CheckLength(peer, length, part.nbytes)) return false;
    if (transfer->received == sizeof(length) + part.nbytes) {
      transfer->receives.pop_front();
      transfer->received = 0;
    }
  }
  return true;
}

bool Network::CheckLength(std::size_t peer, std::uint64_t sent, std::uint64_t expected) {
  if (sent == expected) return true;
  Fail(Result::kInvalidUsage, "rank " + std::to_string(peer) + " sends " + std::to_string(sent) +
                                  " bytes where this rank expects " + std::to_string(expected));
  return false;
}

bool Network::is_idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_done_ == next_number_;
}

void Network::Abort() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_aborted_ = true;
  for (const int socket : sockets_) {
    if (socket >= 0) shutdown(socket, SHUT_RDWR);
  }
  turn_.notify_all();
}

void Network::Fail(Result state, const std::string& text) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ != Result::kSuccess) return;
  state_ = state;
  error_ = text;
}

Result Network::state() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return state_;
}

std::string Network::error() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

}  // namespace zcomm::emulated
