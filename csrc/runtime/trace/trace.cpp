// Keeps counts of events, the log of those recorded, and each thread's open events.
#include "runtime/trace/trace.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <new>
#include <utility>

#include "runtime/fork.h"

namespace torch_blocked::trace {
namespace {

std::array<std::atomic<std::int64_t>, kCounted> counts;
std::atomic<int> recorders{0};
std::atomic<std::int64_t> last_id{0}, last_thread{0};
std::vector<Event> log;
bool lost = false;  // whether the log lacks an event, for want of memory
ForkMutex log_mutex([] { abandon(log); });

thread_local std::vector<Event> opened;
thread_local OnReorder on_reorder;

// Recordings of this thread. A child of fork() continues only these.
thread_local int own_recorders = 0;
const bool at_fork = (in_forked_children([] { recorders = std::max(own_recorders, 0); }), true);

// Sets the event's id and thread, and what it inherits from the event around it.
void place(Event& event) {
  event.id = ++last_id;
  event.thread = this_thread();
  const Event* around = innermost();
  if (!around) return;
  event.parent = around->id;
  if (!event.is_backward) event.is_backward = around->is_backward;
  if (event.module.empty()) event.module = around->module;
}

void count(Kind kind) {
  const auto place = static_cast<std::size_t>(kind);
  if (place < counts.size()) counts[place].fetch_add(1, std::memory_order_relaxed);
}

// Called where nothing may throw: at the end of a Timed, and by observers. stop() throws instead.
void keep(Event event) noexcept {
  const std::lock_guard lock(log_mutex);
  try {
    log.push_back(std::move(event));
  } catch (const std::bad_alloc&) {
    lost = true;
  }
}

void note_recording(std::int64_t ns) {
  if (Event* around = innermost()) around->recording_ns += ns;
}

}  // namespace

std::int64_t now_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::int64_t this_thread() {
  thread_local const std::int64_t id = ++last_thread;
  return id;
}

bool recording() { return recorders.load(std::memory_order_relaxed) > 0; }

void record(Event event) {
  count(event.kind);
  if (!recording()) return;
  place(event);
  event.start_ns = now_ns() - event.time_ns;
  keep(std::move(event));
}

std::size_t open(Event event, std::int64_t since) {
  place(event);
  event.start_ns = now_ns();
  if (since > 0) note_recording(event.start_ns - since);
  opened.push_back(std::move(event));
  return opened.size() - 1;
}

void close(std::size_t place, std::int64_t at) {
  const std::int64_t end = at > 0 ? at : now_ns();
  while (opened.size() > place) {
    Event event = std::move(opened.back());
    opened.pop_back();
    event.time_ns = end - event.start_ns;
    if (recording()) keep(std::move(event));
  }
  note_recording(now_ns() - end);
}

void watch_reorders(OnReorder watcher) { on_reorder = std::move(watcher); }

const OnReorder& reorder_watcher() { return on_reorder; }

Event* innermost() { return opened.empty() ? nullptr : &opened.back(); }

void note_implementation(const char* implementation) {
  Event* event = innermost();
  if (event && event->kind != Kind::kModule && event->implementation.empty()) {
    event->implementation = implementation;
  }
}

Timed::Timed(Kind kind, const char* op, std::int64_t bytes) : kind_(kind) {
  if (recording()) place_ = open({kind, op, {}, bytes});
}

Timed::~Timed() {
  count(kind_);
  if (place_) close(*place_);
}

void Timed::describe(std::string detail) {
  if (place_) innermost()->detail = std::move(detail);
}

std::size_t start() {
  std::lock_guard lock(log_mutex);
  recorders.fetch_add(1);
  ++own_recorders;
  return log.size();
}

std::vector<Event> stop(std::size_t position) {
  std::lock_guard lock(log_mutex);
  --own_recorders;
  const bool is_last = recorders.fetch_sub(1) == 1;
  std::vector<Event> all;
  if (is_last) all.swap(log);
  if (is_last ? std::exchange(lost, false) : lost) throw std::bad_alloc();
  const std::vector<Event>& from = is_last ? all : log;
  return {from.begin() + static_cast<std::ptrdiff_t>(position), from.end()};
}

std::array<std::int64_t, kCounted> totals() {
  std::array<std::int64_t, kCounted> result{};
  for (std::size_t kind = 0; kind < result.size(); ++kind) result[kind] = counts[kind].load();
  return result;
}

}  // namespace torch_blocked::trace
