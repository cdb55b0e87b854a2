// What a child of fork() finds.
//
// It has one thread, the one that forked. What others held stays held for ever there, and what they
// were writing stays half written, unless somebody cares for it: here.
#pragma once

#include <pthread.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <new>

namespace torch_blocked {

// A mutex that is free in a child of fork(), unless the thread that forked holds it. Where another
// thread held it, `renew` is called in the child before anybody has the mutex: to begin anew with
// what that thread may have left half written.
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
  ForkMutex *before_ = nullptr, *after_ = nullptr;  // of all that there are
};

// What may be half written is made anew where it lies, and its memory is left to the dead: nobody
// could free it.
template <typename Value>
void abandon(Value& value) {
  new (&value) Value();
}

// While one lives, fork() waits: for code of others that holds locks of its own, such as oneDNN
// where it makes a primitive. Neither locks of ours nor the GIL may be waited for meanwhile.
class NoFork {
 public:
  NoFork();
  NoFork(const NoFork&) = delete;
  NoFork& operator=(const NoFork&) = delete;
  ~NoFork();
};

// Calls `then` in each child of fork(), where it may neither raise nor take a mutex.
void in_forked_children(void (*then)());

}  // namespace torch_blocked
