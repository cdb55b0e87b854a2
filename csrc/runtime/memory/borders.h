// Borders between what is cut from one block of memory, for AddressSanitizer (make asan).
//
// It sees each overrun of a block that malloc gave, but not one from a part of a block into the
// next. So in that build parts are apart by a border that nobody may touch. Elsewhere there are no
// borders.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace torch_blocked {

#if defined(__SANITIZE_ADDRESS__)

inline constexpr std::int64_t kBorder = 64;  // behind each part

// Of `held` bytes the first `bytes` may be used; the others are a border.
inline void set_border(void* data, std::int64_t bytes, std::int64_t held) {
  ASAN_UNPOISON_MEMORY_REGION(data, static_cast<std::size_t>(bytes));
  ASAN_POISON_MEMORY_REGION(static_cast<char*>(data) + bytes,
                            static_cast<std::size_t>(held - bytes));
}

#else

inline constexpr std::int64_t kBorder = 0;

inline void set_border(void*, std::int64_t, std::int64_t) {}

#endif

}  // namespace torch_blocked
