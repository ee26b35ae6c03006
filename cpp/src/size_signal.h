#pragma once

#include <pthread.h>

#include <csignal>
#include <ctime>

namespace zcomm {

// A write beyond the file size limit (RLIMIT_FSIZE) raises SIGXFSZ and then fails with EFBIG. The error is reported;
// the signal would end the process wherever it is not ignored. Python ignores it, until LLVM compiles a Triton kernel
// in the process and takes the signal. While this lives, neither this thread nor one that it starts gets it.
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
    while (sigtimedwait(&size_, nullptr, &now) > 0) {  // what came is dropped
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
