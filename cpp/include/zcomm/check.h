#pragma once

#include <sstream>
#include <stdexcept>

// Throws std::invalid_argument with the message (the remaining arguments, streamed one after another), the condition's
// text, file and line unless `cond` holds. For what a caller can cause.
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
