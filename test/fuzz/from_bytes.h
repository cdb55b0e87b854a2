// Numbers from the bytes that a fuzzer gives, and what a target says when something does not hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

namespace torch_blocked::fuzz {

// Reads bytes from the front. What is read beyond the end is 0.
class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size)
      : left_(reinterpret_cast<const char*>(data), size) {}

  bool empty() const { return left_.empty(); }

  std::uint8_t byte() {
    if (left_.empty()) return 0;
    const auto first = static_cast<std::uint8_t>(left_.front());
    left_.remove_prefix(1);
    return first;
  }

  // From 0 to `count` - 1, for at most 256.
  int below(int count) { return byte() % count; }

  // Small numbers often, numbers near the ends of 64 bits sometimes.
  std::int64_t number() {
    const int kind = byte();
    if (kind < 200) return kind % 20;
    if (kind < 216) return std::int64_t{1} << below(63);
    if (kind < 232) return -below(10);
    std::uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) bits = bits << 8 | byte();
    return static_cast<std::int64_t>(bits);
  }

  std::string_view rest() { return std::exchange(left_, {}); }

  std::string_view up_to(std::size_t count) {
    const std::string_view part = left_.substr(0, count);
    left_.remove_prefix(part.size());
    return part;
  }

 private:
  std::string_view left_;
};

// Ends the process, which the fuzzer notes with the input.
inline void must_hold(bool holds, std::string_view what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %.*s\n", static_cast<int>(what.size()), what.data());
  std::abort();
}

// Every refusal is one sentence of this form.
inline void must_be_a_sentence(const std::exception& error) {
  const std::string_view text = error.what();
  must_hold(text.starts_with("torch_blocked::") && text.find(": expected ") != text.npos &&
                text.find(", got ") != text.npos,
            text);
}

}  // namespace torch_blocked::fuzz
