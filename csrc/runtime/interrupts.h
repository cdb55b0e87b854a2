// Lets a user stop long work. Ctrl-C is a signal that only Python sees.
#pragma once

#include <exception>
#include <functional>

namespace torch_blocked {

// The host (Python) sets these once. `check` raises an error if somebody wants to stop. `is_one`
// tells whether an error means that rather than a failure: nobody may swallow such an error.
struct Interrupts {
  std::function<void()> check;
  std::function<bool(const std::exception&)> is_one;
};
void set_interrupts(Interrupts interrupts);

// Calls `check` if the last time was a while ago. It may raise, so call it where work can be
// abandoned.
void check_interrupts();
bool is_interrupt(const std::exception& error);

}  // namespace torch_blocked
