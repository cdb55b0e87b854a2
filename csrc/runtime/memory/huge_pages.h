// Asks the system for memory in pages of 2 MiB.
//
// A fresh page costs a fault (0.5 us for 4 KiB), and scattered 4 KiB pages crowd some sets of L2
// while others stay empty: packing 38 MB of weights is 5 times faster in huge pages.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace torch_blocked {

inline constexpr std::size_t kHugePage = 2 << 20;

// Asks for huge pages within [data, data + bytes); only untouched memory gains. The system may
// ignore the request, so it cannot fail.
inline void prefer_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] std::size_t bytes) {
#ifdef MADV_HUGEPAGE
  const auto begin =
      (reinterpret_cast<std::uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  const auto end = (reinterpret_cast<std::uintptr_t>(data) + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace torch_blocked
