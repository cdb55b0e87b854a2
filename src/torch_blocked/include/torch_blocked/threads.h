// Shares loops among torch's threads.
//
// A loop's units are cut into pieces, and each thread has a share of them. It takes its own pieces
// from the front, and then helps the others from the end of theirs. So a thread that loses its core
// to another process delays only its current piece, not its share.
#pragma once

#include <c10/util/FunctionRef.h>

#include <chrono>
#include <cstdint>

#include "torch_blocked/export.h"

namespace torch_blocked {

struct Range {
  std::int64_t begin, end;

  bool operator==(const Range&) const = default;
};

// The pieces of one loop that one thread takes.
class Pieces {
 public:
  virtual bool next(Range& piece) = 0;  // false: none is left

 protected:
  ~Pieces() = default;
};

// Calls body(Pieces&) on every thread. Each unit of [0, units) is in exactly one piece of one
// thread. For bodies that keep something from piece to piece. `unit_elements`: elements per unit. A
// piece has at least 32768 elements, ATen's limit below which another thread costs more than it
// saves, or a quarter of that inside on_all_threads(), where the threads already run together.
TORCH_BLOCKED_API void share_units(std::int64_t units, std::int64_t unit_elements,
                                   c10::function_ref<void(Pieces&)> body);
inline constexpr std::int64_t kLargeUnit = 32768;  // elements of a unit that is worth a piece

// How many pieces the largest loop of this thread since the last call could be cut into. More
// threads than these would have had nothing to do. 0: there was no loop.
std::int64_t take_most_pieces();

// Measures how long this thread's work would take if every thread always had a core: what all
// threads compute in its loops, without waits and divided by pieces, plus what it computes itself
// between loops. Of code that has threads of its own, it sees only this thread.
class WorkTimer {
 public:
  WorkTimer();
  ~WorkTimer();
  WorkTimer(const WorkTimer&) = delete;
  WorkTimer& operator=(const WorkTimer&) = delete;

  std::chrono::nanoseconds elapsed() const;
  void add_team(std::chrono::nanoseconds by_all, std::chrono::nanoseconds by_this_thread);

 private:
  std::chrono::nanoseconds start_, in_teams_{0};
  WorkTimer* outer_;
};

// Calls body(begin, end) on parts of [0, units).
template <typename Body>
void parallel_units(std::int64_t units, std::int64_t unit_elements, Body&& body) {
  share_units(units, unit_elements, [&](Pieces& pieces) {
    for (Range piece; pieces.next(piece);) body(piece.begin, piece.end);
  });
}

// Calls walk() once on every thread at the same time. All calls must reach the same loops
// (parallel_units, share_units) in the same order. Each loop is shared by the threads that have
// reached it: a thread that comes late finds its share done by the others, and nobody waits for it.
// Code between the loops runs on every thread, so it must be cheap and do the same each time. If
// other callers run, too, the call gets the remaining cores, at least one.
TORCH_BLOCKED_API void on_all_threads(c10::function_ref<void()> walk);

// How many threads share a loop.
TORCH_BLOCKED_API int threads();

}  // namespace torch_blocked
