// Integer division that rounds up.
#pragma once

#include <cstdint>

namespace torch_blocked {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t value, std::int64_t to) {
  return ceil_div(value, to) * to;
}

}  // namespace torch_blocked
