// Sharing loops among torch's threads.
//
// A loop's units are cut into pieces. Each thread has its share of them, which it takes from the
// front, and then helps the others from the end of theirs: one that lost its core to another
// process holds up the piece it is at, not its share.
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

// Calls body(Pieces&) on every thread; each unit of [0, units) is in one piece of one of them. For
// bodies that keep something from piece to piece. `unit_elements`: a piece has at least 32768
// elements, ATen's limit below which another thread costs more than it saves; or a quarter of them
// where on_all_threads() has brought the threads together before.
TORCH_BLOCKED_API void share_units(std::int64_t units, std::int64_t unit_elements,
                                   c10::function_ref<void(Pieces&)> body);
inline constexpr std::int64_t kLargeUnit = 32768;  // elements of a unit that is worth a piece

// Into how many pieces the largest loop of this thread since the last call could be cut: no more
// threads than these would have had something to do. 0: there was none.
std::int64_t take_most_pieces();

// How long what this thread does would take if every thread had a core all the time: what threads
// compute in its loops, without waits, shared out by pieces, and what it computes itself between
// them. Of code that has threads of its own it sees nothing but this one.
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

// Calls walk() once on every thread at the same time. All calls must come to the same loops
// (parallel_units, share_units) in the same order, and each loop is then shared by the threads that
// have reached it: a thread that comes late finds its share done by the others, and nobody waits
// for it. Code between the loops runs on every thread, so it must be cheap and do the same each
// time. Beside the threads of other callers there are as many as cores are left, at least one.
TORCH_BLOCKED_API void on_all_threads(c10::function_ref<void()> walk);

// How many threads share a loop.
TORCH_BLOCKED_API int threads();

}  // namespace torch_blocked
