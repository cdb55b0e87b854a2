// Shares loops among a team of threads.
// A thread reports its finished pieces once per loop, in a cache line that only it writes. The
// others add up these lines while they wait. On 16 cores of a Xeon, a core reads what another core
// has written at 6 to 8 GB/s, and what all cores read at once at 27: most of the time lost on many
// cores is lost there. Estimates account for how many threads a cut keeps busy: on 16 threads a
// Winograd convolution of four tiles takes as long as on four.
#include "torch_blocked/threads.h"

#include <ATen/Parallel.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <latch>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "runtime/available_threads.h"
#include "runtime/estimated_threads.h"
#include "runtime/fork.h"

namespace torch_blocked {
namespace {

using Clock = std::chrono::steady_clock;

// At the end of a loop the threads wait for the last piece. With this many pieces, one takes 25 us
// in a step of 0.4 ms.
constexpr std::int64_t kPiecesPerThread = 16;
// Of a loop: what Taken can count. A team may have fewer threads than threads() says, so one may
// get all pieces.
constexpr std::int64_t kMostPieces = std::numeric_limits<std::uint16_t>::max();

// The least elements of a piece if the threads already go through loops together: sharing then
// costs 0.2 us and no start of threads. A layer norm of [197, 192] takes 4.2 us on two threads
// instead of 6.8. MixNet-S takes 0.95 of the time, EfficientNet-B0 and RegNetY-008 0.98, and none
// of 13 models takes more.
constexpr std::int64_t kTeamPiece = kLargeUnit / 4;

// How often a thread offers its core to other processes, between two pieces. Otherwise the system
// takes the core away in the middle of a piece, for 4 ms, while the others wait for that piece.
// ResNet-50 on two cores, one of them busy (benchmarks/peers.py --busy 1), takes 1.65 times as long
// as alone with such offers and 2.3 times without. An offer that nobody takes costs 0.3 us.
constexpr std::chrono::microseconds kTurn{2000};
// If more time than this passes between two offers, the thread had lost its core, and its turn
// starts again.
constexpr std::chrono::microseconds kAway{1000};
// After this many spins a waiting thread yields its core, too. If teams have more threads than
// there are cores it yields at once: the thread that it waits for may need its core.
constexpr int kSpins = 1 << 14;

int cores() {
  static const auto count = static_cast<int>(std::thread::hardware_concurrency());
  return count;
}

// Limits the threads of all teams of the process together. A team that starts while others run gets
// the remaining cores, at least one: if all callers took all cores, they would wait for threads
// without a core. Results have the same bits with any number of threads.
class Places {
 public:
  explicit Places(int wanted) {
    int taken = all.load(std::memory_order_relaxed);
    do {
      count_ = taken == 0 ? wanted : std::clamp(cores() - taken, 1, wanted);
    } while (!all.compare_exchange_weak(taken, taken + count_, std::memory_order_relaxed));
  }
  Places(const Places&) = delete;
  Places& operator=(const Places&) = delete;
  ~Places() { all.fetch_sub(count_, std::memory_order_relaxed); }

  int count() const { return count_; }
  static bool are_more_than_cores() { return all.load(std::memory_order_relaxed) > cores(); }

 private:
  static inline std::atomic<int> all{0};
  // A child of fork() has no other threads.
  static inline const bool at_fork = (in_forked_children([] { all = 0; }), true);
  int count_;
};

// Calls work(id) on `count` threads, of which this is the first.
void run_together(int count, c10::function_ref<void(int)> work) {
#if defined(__SANITIZE_THREAD__)
  // ThreadSanitizer sees how these begin and end. It does not see that of libgomp's threads, and
  // would take all that a team reads and writes for races.
  std::vector<std::jthread> others;
  for (int id = 1; id < count; ++id) others.emplace_back(work, id);
  work(0);
#else
#pragma omp parallel num_threads(count)
  work(omp_get_thread_num());
#endif
}

void pause() {
#if defined(__SSE2__)
  _mm_pause();
#endif
}

// The CPU time of this thread, without the time in which others had its core.
std::chrono::nanoseconds thread_time() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

thread_local WorkTimer* work_timer = nullptr;

constexpr std::size_t kLine = 64;

// How many pieces of one thread's share are taken. It is a single word, so that it changes
// atomically.
struct Taken {
  std::uint32_t loop;         // counted from 1; counts of an earlier loop do not matter
  std::uint16_t front, back;  // pieces taken from either end
};

// What other threads see of a thread, in one cache line: what is left of its share, and how many
// pieces of all loops it has done, its own and others'.
struct alignas(kLine) Share {
  std::atomic<Taken> taken{Taken{}};
  std::atomic<std::int64_t> done{0};  // only the thread itself adds to it

  void add_done(std::int64_t more) {
    done.store(done.load(std::memory_order_relaxed) + more, std::memory_order_release);
  }
};
static_assert(std::atomic<Taken>::is_always_lock_free);

// The threads that go through the same loops.
struct Team {
  std::vector<Share> shares;
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::exception_ptr error;
  bool is_timed;
  std::atomic<std::int64_t> work_ns{0};  // of one thread, if all took equally many pieces

  Team(std::size_t threads, bool is_timed) : shares(threads), is_timed(is_timed) {}

  std::int64_t size() const { return std::ssize(shares); }

  void fail() {
    const std::lock_guard lock(mutex);
    if (!error) error = std::current_exception();
    failed = true;
  }

  // Whether `pieces` pieces, all those of the loops so far, are done. Nobody begins a loop before
  // all pieces of the last one are done, so pieces of the next loop cannot be counted in their
  // place. A thread that gets true also sees everything that the others wrote before.
  bool has_done(std::int64_t pieces) const {
    for (const Share& each : shares) pieces -= each.done.load(std::memory_order_acquire);
    return pieces <= 0;
  }

  void wait_for(std::int64_t pieces) const {
    int spins = Places::are_more_than_cores() ? kSpins : 0;
    for (; !has_done(pieces) && !failed; ++spins) {
      spins < kSpins ? pause() : static_cast<void>(sched_yield());
    }
  }
};

// One thread of a team.
struct Member {
  Team& team;
  std::int64_t id;
  std::uint32_t loop = 0;
  std::int64_t pieces = 0;  // of the loops so far, of all threads
  Clock::time_point turn = Clock::now(), last = turn;

  // Whether it is time to offer the core.
  bool offers_core() {
    const auto now = Clock::now();
    if (now - last > kAway) turn = now;
    last = now;
    return now - turn >= kTurn;
  }
  void offer_core() {
    sched_yield();
    last = turn = Clock::now();
  }
};

thread_local Member* member = nullptr;
thread_local std::int64_t most_pieces = 0;

// The number of threads in estimates under is_deterministic(): few enough for a small machine, and
// enough that cuts which leave threads idle cost more. 0: as many as run.
constexpr int kEstimated = 4;
thread_local int estimated = 0;

class TeamPieces final : public Pieces {
 public:
  TeamPieces(Member& member, std::int64_t units, std::int64_t pieces)
      : member_(member), units_(units), pieces_(pieces) {}

  bool next(Range& piece) override {
    const std::int64_t size = member_.team.size();
    if (member_.offers_core()) {
      tell();  // first: others may wait for the pieces that are done
      member_.offer_core();
    }
    for (; helped_ < size && !member_.team.failed; ++helped_) {
      if (helped_ == 1) tell();  // while it looks for others' pieces
      const std::int64_t id = (member_.id + helped_) % size;
      const std::int64_t i =
          take(member_.team.shares[static_cast<std::size_t>(id)], first_of(id), first_of(id + 1));
      if (i < 0) continue;
      ++untold_;
      piece = {i * units_ / pieces_, (i + 1) * units_ / pieces_};
      return true;
    }
    return false;
  }
  // Tells the team how many pieces are done.
  void tell() {
    if (untold_ > 0) own().add_done(std::exchange(untold_, 0));
  }

 private:
  Share& own() const { return member_.team.shares[static_cast<std::size_t>(member_.id)]; }
  // Where a thread's share begins. The calling thread does loops of one piece: its caches have what
  // the loop reads.
  std::int64_t first_of(std::int64_t id) const {
    const std::int64_t size = member_.team.size();
    return (id * pieces_ + size - 1) / size;
  }

  // Takes a piece of [begin, end) from the front of the thread's own share, or from the back of
  // another's; -1: none is left.
  std::int64_t take(Share& share, std::int64_t begin, std::int64_t end) const {
    Taken seen = share.taken.load(std::memory_order_acquire), now{};
    std::int64_t piece = -1;
    do {
      if (seen.loop > member_.loop) return -1;
      now = seen.loop == member_.loop ? seen : Taken{member_.loop, 0, 0};
      if (begin + now.front + now.back >= end) return -1;
      piece = helped_ == 0 ? begin + now.front++ : end - ++now.back;
    } while (!share.taken.compare_exchange_weak(seen, now, std::memory_order_acq_rel));
    return piece;
  }

  Member& member_;
  std::int64_t units_, pieces_, helped_ = 0, untold_ = 0;
};

// A whole loop as one piece, for a single thread.
class OnePiece final : public Pieces {
 public:
  explicit OnePiece(std::int64_t units) : left_(units) {}
  bool next(Range& piece) override {
    piece = {0, left_};
    return std::exchange(left_, 0) > 0;
  }

 private:
  std::int64_t left_;
};

// A thread's contribution to the time of a loop, from its work: the loop takes as many pieces as
// the busiest thread must take, each with the mean time.
std::int64_t part_ns(std::chrono::nanoseconds work, std::int64_t pieces, std::int64_t threads) {
  return work.count() * ((pieces + threads - 1) / threads) / pieces;
}

void share(Member& self, std::int64_t units, std::int64_t pieces,
           c10::function_ref<void(Pieces&)> body) {
  ++self.loop;
  self.pieces += pieces;
  TeamPieces mine(self, units, pieces);
  const bool is_timed = self.team.is_timed;
  const auto start = is_timed ? thread_time() : std::chrono::nanoseconds(0);
  member = nullptr;  // loops in the body are the thread's own
  try {
    body(mine);  // takes all pieces
    mine.tell();
  } catch (...) {
    self.team.fail();
  }
  member = &self;
  if (is_timed) self.team.work_ns += part_ns(thread_time() - start, pieces, self.team.size());
  self.team.wait_for(self.pieces);
}

}  // namespace

int available_threads(int wanted) {
  static std::atomic<int> tried{1};
  static const bool at_fork = (in_forked_children([] { tried = 1; }), true);
  const int before = tried;
  if (!at_fork || wanted <= before) return wanted;
  std::latch all_tried(1);
  std::vector<std::thread> more;
  try {
    more.reserve(static_cast<std::size_t>(wanted - before));
    for (int i = before; i < wanted; ++i) more.emplace_back([&] { all_tried.wait(); });
  } catch (const std::exception&) {  // it has as many as there are now
  }
  all_tried.count_down();
  for (std::thread& each : more) each.join();
  const int given = before + static_cast<int>(more.size());
  for (int last = before; last < given && !tried.compare_exchange_weak(last, given);) {
  }
  return given;
}

EstimatedThreads::EstimatedThreads() : before_(estimated) {
  if (is_deterministic()) estimated = kEstimated;
}

EstimatedThreads::~EstimatedThreads() { estimated = before_; }

int threads() {
  return estimated > 0       ? estimated
         : member            ? static_cast<int>(member->team.size())
         : omp_in_parallel() ? 1
                             : at::get_num_threads();
}

void share_units(std::int64_t units, std::int64_t unit_elements,
                 c10::function_ref<void(Pieces&)> body) {
  if (units <= 0) return;
  const std::int64_t piece = member ? kTeamPiece : kLargeUnit;
  const std::int64_t least =
      std::max<std::int64_t>(1, piece / std::max<std::int64_t>(1, unit_elements));
  const std::int64_t most = std::max<std::int64_t>(units / least, 1);
  const std::int64_t pieces =
      std::min({most, std::int64_t{threads()} * kPiecesPerThread, kMostPieces});
  most_pieces = std::max(most_pieces, most);
  if (member) return share(*member, units, pieces, body);
  if (threads() > 1 && pieces > 1) {
    return on_all_threads([&] { share(*member, units, pieces, body); });
  }
  OnePiece all(units);
  body(all);
}

std::int64_t take_most_pieces() { return std::exchange(most_pieces, 0); }

void on_all_threads(c10::function_ref<void()> walk) {
  if (member || threads() == 1) return walk();
  const Places places(threads());
  const int count = available_threads(places.count());
  WorkTimer* const timer = work_timer;
  Team team(static_cast<std::size_t>(count), timer != nullptr);
  const auto start = timer ? thread_time() : std::chrono::nanoseconds(0);
  run_together(count, [&](int id) {
    Member self{team, id};
    member = &self;
    try {
      walk();
    } catch (...) {
      team.fail();
    }
    member = nullptr;
  });
  if (timer) timer->add_team(std::chrono::nanoseconds(team.work_ns), thread_time() - start);
  if (team.error) std::rethrow_exception(team.error);
}

WorkTimer::WorkTimer() : start_(thread_time()), outer_(std::exchange(work_timer, this)) {}

WorkTimer::~WorkTimer() { work_timer = outer_; }

std::chrono::nanoseconds WorkTimer::elapsed() const { return thread_time() - start_ + in_teams_; }

void WorkTimer::add_team(std::chrono::nanoseconds by_all, std::chrono::nanoseconds by_this_thread) {
  in_teams_ += by_all - by_this_thread;
}

}  // namespace torch_blocked
