// Handlers that run before and after fork(): they hold it back while NoFork objects live, and free
// mutexes in the child.
#include "runtime/fork.h"

#include <ATen/CPUGeneratorImpl.h>

#include <vector>

namespace torch_blocked {

// Never destroyed: mutexes of other static objects may outlive every other one.
struct ForkHandlers {
  std::mutex mutex;  // guards the next two; held only while they are written
  ForkMutex* first = nullptr;
  std::vector<void (*)()> callbacks;
  // NoFork objects are readers, fork() is the writer. Readers come first, so that they may nest.
  pthread_rwlock_t gate = PTHREAD_RWLOCK_INITIALIZER;

  static ForkHandlers& all() {
    static ForkHandlers& handlers = *new ForkHandlers;
    return handlers;
  }

  ForkHandlers() { pthread_atfork(before, in_parent, in_child); }

  // torch does not free the lock of its random numbers in a child of fork(). Capture and
  // verification set the generator's state in any thread, so we have to free it.
  static std::mutex& random_numbers() {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    return generator.mutex();
  }

  static void before() {
    pthread_rwlock_wrlock(&all().gate);
    all().mutex.lock();
    random_numbers().lock();
  }
  static void in_parent() {
    random_numbers().unlock();
    all().mutex.unlock();
    pthread_rwlock_unlock(&all().gate);
  }
  static void in_child() {
    random_numbers().unlock();
    new (&all().mutex) std::mutex;
    all().gate = PTHREAD_RWLOCK_INITIALIZER;
    for (ForkMutex* each = all().first; each; each = each->after_) each->free_in_child();
    for (const auto then : all().callbacks) then();
  }
};

ForkMutex::ForkMutex(Renew renew) : renew_(std::move(renew)) {
  ForkHandlers& all = ForkHandlers::all();
  const std::lock_guard lock(all.mutex);
  after_ = all.first;
  if (after_) after_->before_ = this;
  all.first = this;
}

ForkMutex::~ForkMutex() {
  ForkHandlers& all = ForkHandlers::all();
  const std::lock_guard lock(all.mutex);
  if (after_) after_->before_ = before_;
  (before_ ? before_->after_ : all.first) = after_;
}

// Called by the child's only thread. A thread that was just locking or unlocking the mutex counts
// as its holder.
void ForkMutex::free_in_child() {
  if (pthread_equal(owner_.load(), pthread_self())) return;
  if (mutex_.try_lock()) return mutex_.unlock();
  new (&mutex_) std::mutex;
  owner_ = pthread_t{};
  if (renew_) renew_();
}

NoFork::NoFork() { pthread_rwlock_rdlock(&ForkHandlers::all().gate); }
NoFork::~NoFork() { pthread_rwlock_unlock(&ForkHandlers::all().gate); }

void in_forked_children(void (*then)()) {
  ForkHandlers& all = ForkHandlers::all();
  const std::lock_guard lock(all.mutex);
  all.callbacks.push_back(then);
}

}  // namespace torch_blocked
