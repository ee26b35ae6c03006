#pragma once

#include <sstream>
#include <stdexcept>

// For errors that a caller can cause: throws std::invalid_argument unless `cond` holds. The text is the remaining
// arguments, streamed one after another, then the condition, file and line.
#define ZCOMM_CHECK(cond, ...)                                                \
  do {                                                                        \
    if (!(cond)) ::zcomm::ThrowCheck(#cond, __FILE__, __LINE__, __VA_ARGS__); \
  } while (false)

namespace zcomm {

template <class... Parts>
[[noreturn]] void ThrowCheck(const char* cond, const char* file, int line, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts) << " (" << cond << " at " << file << ":" << line << ")";
  throw std::invalid_argument(text.str());
}

}  // namespace zcomm
