// How a user stops what takes long: Ctrl-C in Python, whose signals only Python knows.
#pragma once

#include <exception>
#include <functional>

namespace torch_blocked {

// What runs this library tells, once, how to ask whether somebody wants it to stop, which raises an
// error if so, and which errors mean that rather than a failure: those nobody may swallow.
struct Interrupts {
  std::function<void()> check;
  std::function<bool(const std::exception&)> is_one;
};
void set_interrupts(Interrupts interrupts);

// Asks, if the last time was a while ago. May raise; to be called where work can be left.
void check_interrupts();
bool is_interrupt(const std::exception& error);

}  // namespace torch_blocked
