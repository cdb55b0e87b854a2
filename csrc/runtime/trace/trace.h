// What happened, told to whoever asks: what costs time without computing (reorders, weight packs,
// dense fallbacks, `ref` kernels that were refused), which is always counted; and, while someone
// records, also the modules and ops that ran, each with its time and all that is in it.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace torch_blocked::trace {

// kModule: a module's forward, or the backward of one of its ops. kOp: an op, or a step of a plan.
// kOneDnn: what torch's own oneDNN ran in an op, in its words.
enum class Kind { kReorder, kPack, kFallback, kRef, kModule, kOp, kOneDnn };
inline constexpr int kCounted = 4;  // those before kModule

struct Event {
  Kind kind;
  std::string op;      // who asked: "to_blocked", "convolution", "aten.cumsum.default"
  std::string detail;  // what and why: "nchw -> nChw16c", "oneDNN has only ref:any"
  std::int64_t bytes = 0;
  std::int64_t time_ns = 0;
  // Known while someone records.
  std::string module = {};    // the path of the module that ran
  bool is_backward = false;   // in the backward of that module
  std::string line = {};      // of the user's code, where it is known: "model.py:12"
  std::int64_t start_ns = 0;  // of the steady clock
  std::int64_t id = 0;        // counted from 1
  std::int64_t parent = 0;    // the id of what it happened in; 0: of nothing
  std::int64_t thread = 0;    // counted from 1
  std::string src = {};       // of ops: "nChw16c [1, 64, 56, 56]"
  std::string dst = {};       // likewise
  std::string implementation = {};
  double flops = 0;  // of an op's products
  // Of time_ns, what recording itself took: between the events in it, not in them.
  std::int64_t recording_ns = 0;
};

// Counts the event; keeps it whole while someone records.
void record(Event event);

// Whether anyone records: details need not be built otherwise.
bool recording();

// Recordings nest. start() gives a position; stop(position) gives the events since then.
std::size_t start();
std::vector<Event> stop(std::size_t position);

// Events since the library was loaded, by kind, of those that are counted.
std::array<std::int64_t, kCounted> totals();

// Begins something in which others happen, in this thread; returns its place for close(), which
// keeps it, and closes what was left open inside. Its module is that of what it happens in, if it
// names none. To be called while recording() only; close() also after that. since, at: times of the
// steady clock between which and the call nothing but recording was done, so that it is no part of
// the event's time, but of the recording_ns of what it happens in; 0: none.
std::size_t open(Event event, std::int64_t since = 0);
void close(std::size_t place, std::int64_t at = 0);
std::int64_t now_ns();
// The number of this thread, as in events.
std::int64_t this_thread();
// The innermost that this thread has open; null if there is none.
Event* innermost();
// Notes what the innermost op or reorder runs by, unless that is known.
void note_implementation(const char* implementation);

// Called before each reorder of this thread that is no optimized model's own, and may raise; empty:
// nobody.
using OnReorder = std::function<void(const char* op, const std::string& formats)>;
void watch_reorders(OnReorder watcher);
const OnReorder& reorder_watcher();

// Counts an event, and keeps it with the time from construction to destruction.
class Timed {
 public:
  Timed(Kind kind, const char* op, std::int64_t bytes);
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;
  ~Timed();
  // Call it only while recording(): building the text costs more than a small reorder.
  void describe(std::string detail);

 private:
  Kind kind_;
  std::optional<std::size_t> place_;
};

}  // namespace torch_blocked::trace
