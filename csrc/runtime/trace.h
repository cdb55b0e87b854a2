// Counters of what costs time without computing: reorders, weight packs, dense fallbacks, and `ref`
// kernels that were refused.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace torch_blocked::trace {

enum class Kind { kReorder, kPack, kFallback, kRef };
inline constexpr int kKinds = 4;

struct Event {
  Kind kind;
  std::string op;      // who asked: "to_blocked", "convolution", "aten.cumsum.default"
  std::string detail;  // what and why: "nchw -> nChw16c", "oneDNN has only ref:any"
  std::int64_t bytes = 0;
  std::int64_t time_ns = 0;
};

// Counts the event; keeps it whole while someone records.
void record(Event event);

// Whether anyone records: details need not be built otherwise.
bool recording();

// Recordings nest. start() gives a position; stop(position) gives the events since then.
std::size_t start();
std::vector<Event> stop(std::size_t position);

// Events since the library was loaded, by kind.
std::array<std::int64_t, kKinds> totals();

// Records the time from construction to destruction.
class Timed {
 public:
  Timed(Kind kind, const char* op, std::int64_t bytes) : event_{kind, op, {}, bytes, 0} {}
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;
  ~Timed() {
    event_.time_ns = std::chrono::nanoseconds(std::chrono::steady_clock::now() - start_).count();
    record(std::move(event_));
  }
  // Call it only while recording(): building the text costs more than a small reorder.
  void describe(std::string detail) { event_.detail = std::move(detail); }

 private:
  Event event_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace torch_blocked::trace
