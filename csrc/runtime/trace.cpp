#include "runtime/trace.h"

#include <atomic>
#include <mutex>

namespace torch_blocked::trace {
namespace {

std::array<std::atomic<std::int64_t>, kKinds> counts;
std::atomic<int> recorders{0};
std::mutex log_mutex;
std::vector<Event> log;

}  // namespace

bool recording() { return recorders.load(std::memory_order_relaxed) > 0; }

void record(Event event) {
  counts[static_cast<int>(event.kind)].fetch_add(1, std::memory_order_relaxed);
  if (!recording()) return;
  std::lock_guard lock(log_mutex);
  log.push_back(std::move(event));
}

std::size_t start() {
  std::lock_guard lock(log_mutex);
  recorders.fetch_add(1);
  return log.size();
}

std::vector<Event> stop(std::size_t position) {
  std::lock_guard lock(log_mutex);
  std::vector<Event> events(log.begin() + static_cast<std::ptrdiff_t>(position), log.end());
  if (recorders.fetch_sub(1) == 1) log.clear();
  return events;
}

std::array<std::int64_t, kKinds> totals() {
  std::array<std::int64_t, kKinds> result{};
  for (int kind = 0; kind < kKinds; ++kind) result[kind] = counts[kind].load();
  return result;
}

}  // namespace torch_blocked::trace
