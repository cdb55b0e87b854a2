// A value that depends on the number of threads, which may change between runs.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/fork.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {

// Makes the value once for each number of threads. All threads of a loop ask for it at the same
// time, so they read it without a lock, and values live as long as this object.
template <typename Value>
class PerThreads {
 public:
  template <typename Make>
  const Value& get(Make&& make) {
    const Made* last = last_.load(std::memory_order_acquire);
    return last && last->threads == threads() ? last->value : find(make);
  }

 private:
  struct Made {
    int threads;
    Value value;
  };

  template <typename Make>
  const Value& find(Make&& make) {
    const std::lock_guard lock(mutex_);
    const int count = threads();
    for (const auto& each : all_) {
      if (each->threads == count) return (last_ = each.get())->value;
    }
    all_.push_back(std::make_unique<const Made>(count, make()));
    return (last_ = all_.back().get())->value;
  }

  std::atomic<const Made*> last_{nullptr};
  std::vector<std::unique_ptr<const Made>> all_;
  ForkMutex mutex_{[this] { abandon(all_); }};
};

}  // namespace torch_blocked
