#include "runtime/interrupts.h"

#include <chrono>
#include <utility>

namespace torch_blocked {
namespace {

Interrupts& interrupts() {
  static Interrupts& interrupts = *new Interrupts;  // never destroyed: it may hold Python objects
  return interrupts;
}

}  // namespace

void set_interrupts(Interrupts given) { interrupts() = std::move(given); }

void check_interrupts() {
  using Clock = std::chrono::steady_clock;
  // Seldom: the caller waits for the GIL.
  constexpr std::chrono::milliseconds kOften{50};
  static thread_local Clock::time_point last = Clock::now();
  const auto now = Clock::now();
  if (now - last < kOften || !interrupts().check) return;
  last = now;
  interrupts().check();
}

bool is_interrupt(const std::exception& error) {
  return interrupts().is_one && interrupts().is_one(error);
}

}  // namespace torch_blocked
