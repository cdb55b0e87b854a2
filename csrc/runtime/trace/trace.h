// Counts and records events. What costs time without computing is always counted: reorders, weight
// packs, dense fallbacks, refused `ref` kernels. While someone records, the modules and ops that
// ran are kept, too, each with its time and the events inside it.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace torch_blocked::trace {

// kModule: a module's forward, or the backward of one of its ops. kOp: an op, or a step of a plan.
// kOneDnn: what torch's own oneDNN ran in an op, as oneDNN describes it.
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
  bool is_backward = false;   // whether it ran in the backward of that module
  std::string line = {};      // of the user's code, if known: "model.py:12"
  std::int64_t start_ns = 0;  // of the steady clock
  std::int64_t id = 0;        // counted from 1
  std::int64_t parent = 0;    // the id of the event around it; 0: none
  std::int64_t thread = 0;    // counted from 1
  std::string src = {};       // of ops: "nChw16c [1, 64, 56, 56]"
  std::string dst = {};       // likewise
  std::string implementation = {};
  double flops = 0;  // of an op's products
  // The part of time_ns that recording took between the inner events, not inside them.
  std::int64_t recording_ns = 0;
};

// Counts the event; keeps it whole while someone records.
void record(Event event);

// Whether anyone records. Otherwise details need not be built.
bool recording();

// Recordings nest. start() returns a position, and stop(position) returns the events since then.
// stop() ends the recording in any case. It throws bad_alloc if an event was lost for want of
// memory.
std::size_t start();
std::vector<Event> stop(std::size_t position);

// How many events of each counted kind there were since the library was loaded.
std::array<std::int64_t, kCounted> totals();

// Opens an event around others in this thread, and returns its place for close(). close() keeps the
// event, and also closes events that were left open inside. An event that names no module gets that
// of the event around it. Call open() only while recording(); close() may be called later, too.
// `since`: when bookkeeping for this event began; `at`: when bookkeeping for its end began (steady
// clock; 0: none). The time between then and the call is charged to the recording_ns of the event
// around, not to this event's time.
std::size_t open(Event event, std::int64_t since = 0);
void close(std::size_t place, std::int64_t at = 0);
std::int64_t now_ns();
// The number of this thread, as in events.
std::int64_t this_thread();
// The innermost open event of this thread; null if there is none.
Event* innermost();
// Notes the implementation of the innermost op or reorder, unless it is known already.
void note_implementation(const char* implementation);

// Called before each reorder of this thread, except those of optimized models. It may raise. Empty:
// nothing is called.
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
