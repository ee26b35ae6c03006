#pragma once

#include <pthread.h>

#include <csignal>
#include <ctime>

namespace zcomm {

// Blocks SIGXFSZ for the current thread, and for threads that it starts, while the object lives. A write beyond the
// file size limit (RLIMIT_FSIZE) raises SIGXFSZ and fails with EFBIG. We report the error; unless the signal is ignored
// or blocked, it ends the process. Python ignores it, but LLVM installs its own handler when Triton compiles a kernel.
class WithoutSizeSignal {
 public:
  WithoutSizeSignal() {
    sigemptyset(&size_);
    sigaddset(&size_, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &size_, &before_);
  }
  ~WithoutSizeSignal() {
    if (sigismember(&before_, SIGXFSZ) == 1) return;
    const timespec now{};
    // Discard a pending signal: unblocking it would deliver it.
    while (sigtimedwait(&size_, nullptr, &now) > 0) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  WithoutSizeSignal(const WithoutSizeSignal&) = delete;
  WithoutSizeSignal& operator=(const WithoutSizeSignal&) = delete;

 private:
  sigset_t size_{};
  sigset_t before_{};
};

}  // namespace zcomm
