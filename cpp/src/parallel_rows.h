#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>

#include "float_mode.h"
#include "zcomm/thread_pool.h"

namespace zcomm {

// With fewer elements than this, waking a thread costs more than it saves.
inline constexpr std::size_t kMinPartNumel = 32768;

// Splits `num_rows` rows of `row_numel` elements into units of `unit_numel` (a row's last unit may be short),
// distributes the units over threads with ParallelFor, and calls body(row, begin, end) for the elements [begin, end) of
// consecutive units of one row, in IEEE arithmetic.
template <class Body>
void ParallelOverRows(std::size_t num_rows, std::size_t row_numel, std::size_t unit_numel, std::size_t num_threads,
                      const Body& body) {
  if (row_numel == 0) return;
  const std::size_t units_per_row = (row_numel + unit_numel - 1) / unit_numel;
  const std::size_t mean_unit_numel = (row_numel + units_per_row - 1) / units_per_row;
  const std::size_t grain = (kMinPartNumel + mean_unit_numel - 1) / mean_unit_numel;
  ParallelFor(num_rows * units_per_row, grain, num_threads, [&](std::size_t unit, std::size_t end_unit) {
    const IeeeFloatMode ieee;
    while (unit < end_unit) {
      const std::size_t row = unit / units_per_row;
      const std::size_t first = unit % units_per_row;
      const std::size_t count = std::min(end_unit - unit, units_per_row - first);
      body(row, first * unit_numel, std::min(row_numel, (first + count) * unit_numel));
      unit += count;
    }
    // Non-temporal stores are weakly ordered on x86: releasing a lock need not order them. Without this fence the
    // thread that waits for the result could read the old contents of the output.
    std::atomic_thread_fence(std::memory_order_seq_cst);
  });
}

}  // namespace zcomm
