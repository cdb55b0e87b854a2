// Keeps mutexes and data usable in a child of fork().
//
// The child has only the thread that forked. Without this file, mutexes that other threads held
// would stay locked for ever, and data that they were writing would stay half written.
#pragma once

#include <pthread.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <new>

namespace torch_blocked {

// A mutex that is free in a child of fork(), unless the thread that forked holds it. If another
// thread held it, the child first calls `renew`, to start over with data that may be half written.
class ForkMutex {
 public:
  using Renew = std::function<void()>;
  explicit ForkMutex(Renew renew = nullptr);
  ForkMutex(const ForkMutex&) = delete;
  ForkMutex& operator=(const ForkMutex&) = delete;
  ~ForkMutex();

  void lock() {
    mutex_.lock();
    owner_.store(pthread_self(), std::memory_order_relaxed);
  }
  void unlock() {
    owner_.store(pthread_t{}, std::memory_order_relaxed);
    mutex_.unlock();
  }

 private:
  friend struct ForkHandlers;
  void free_in_child();

  std::mutex mutex_;
  std::atomic<pthread_t> owner_{};
  Renew renew_;
  ForkMutex *before_ = nullptr, *after_ = nullptr;  // a list of all ForkMutexes
};

// Replaces a value that may be half written by a new one, in place. The old one's memory is leaked:
// nobody could free it safely.
template <typename Value>
void abandon(Value& value) {
  new (&value) Value();
}

// While an object lives, fork() waits. This is for other libraries' code that holds locks of its
// own, such as oneDNN when it makes a primitive. Meanwhile the thread may wait neither for our
// locks nor for the GIL.
class NoFork {
 public:
  NoFork();
  NoFork(const NoFork&) = delete;
  NoFork& operator=(const NoFork&) = delete;
  ~NoFork();
};

// Calls `then` in each child of fork(). It may neither raise nor take a mutex.
void in_forked_children(void (*then)());

}  // namespace torch_blocked
