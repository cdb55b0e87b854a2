// Times the implementations of a problem on its real shape.
#include <ATen/Parallel.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <locale>
#include <mutex>
#include <sstream>
#include <unordered_map>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "format/errors.h"
#include "graph/planning/plan.h"
#include "runtime/fork.h"
#include "runtime/interrupts.h"
#include "runtime/isa.h"
#include "runtime/own_file.h"
#include "torch_blocked/threads.h"

namespace torch_blocked::graph {
namespace {

using Clock = std::chrono::steady_clock;

// A time counts once another one is within this factor. Disturbances differ from time to time, and
// nothing makes a kernel faster than it is.
constexpr double kAgree = 1.04;
// An implementation that is this much slower than the leader twice is out.
constexpr double kBeaten = 1.15;
// Rounds go on until the times of all that are left agree, or until kTime has passed. An
// implementation without rivals is timed only to know its cost. The first round generates code and
// starts with cold caches, so it seldom agrees with another; but whatever is slow in it and in the
// next is out.
constexpr int kLeastRounds = 4, kLeastAlone = 2;
constexpr std::chrono::milliseconds kTime{12};
// One run of this length is enough; otherwise huge images would be timed for minutes.
constexpr std::chrono::milliseconds kLong{200};
// How long to wait for undisturbed rounds while other processes use the cores.
constexpr std::chrono::milliseconds kPatience{150};
// Longer than threads need to meet if each has a core, and shorter than a time slice on a core that
// is shared.
constexpr std::chrono::microseconds kMeet{30};
constexpr int kTries = 10;
// An implementation that is not loops_only must be faster by this much: threads wait for each other
// before and after it, and they wait long if one of them has lost its core.
constexpr double kMeeting = 1.05;
constexpr std::chrono::microseconds kMeetings{5};
// A reference that takes this many times as long as when it was first timed was disturbed each
// time, so it is no measure. It gets kTimeBeside to do better.
constexpr double kFarFromKnown = 1.15;
constexpr std::chrono::milliseconds kTimeBeside{40};

// How often the system took a core away from this process.
long interruptions() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_nivcsw;
}

// Whether all threads have a core now. A thread that waits for a core is not counted as
// interrupted, but the others wait for it.
bool all_have_cores() {
  const auto start = Clock::now();
  on_all_threads([] {});
  return Clock::now() - start < kMeet;
}

#if defined(__SSE2__)
constexpr std::size_t kLine = 64;

void flush(const char* begin, const char* end) {
  for (; begin < end; begin += kLine) _mm_clflush(begin);
  _mm_mfence();
}

// Flushes cache lines without waiting for each. Flushing took 0.5 s of the threads' time in
// ResNet-50's first optimize on a Xeon, and takes 0.07 s now.
__attribute__((target("clflushopt"))) void flush_unordered(const char* begin, const char* end) {
  for (; begin < end; begin += kLine) _mm_clflushopt(const_cast<char*>(begin));
  _mm_mfence();
}
#endif

// Evicts weights: in a whole model they come from memory. ResNet-50's for Winograd are 180 MB. In
// the cache, the 9 MB of one of its layers seem to cost nothing, but they take 0.2 to 0.4 of 1.1
// ms.
void evict([[maybe_unused]] const at::Tensor& tensor) {
#if defined(__SSE2__)
  constexpr std::int64_t kUnit = 64 << 10;
  static const bool unordered = __builtin_cpu_supports("clflushopt");
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  parallel_units((bytes + kUnit - 1) / kUnit, kUnit, [&](std::int64_t first, std::int64_t last) {
    const char* end = data + std::min(last * kUnit, bytes);
    (unordered ? flush_unordered : flush)(data + first * kUnit, end);
  });
#endif
}

using Microseconds = std::chrono::duration<double, std::micro>;

// An implementation and its two shortest undisturbed times. Of disturbed runs, such as any run of
// some milliseconds on a busy machine, only the time that threads worked counts. Otherwise the
// system takes cores away from some kernels more than from others: a U-Net's plan made next to a
// busy process was up to 1.27 times as slow as one made alone (benchmarks/plans.py).
struct Contender {
  const char* implementation;
  Contest::Entry entry;
  bool tells_work;  // a WorkTimer sees everything that it computes
  Microseconds best = kForever, second = kForever, disturbed = kForever;
  int rounds = 0;

  static constexpr Microseconds kForever{std::numeric_limits<double>::infinity()};

  void run_once() {
    evict(entry.weights);
    for (int tries = 0; tries < kTries && !all_have_cores(); ++tries) {
    }
    const long before = interruptions();
    const WorkTimer work;
    const auto start = Clock::now();
    if (entry.loops_only) {
      on_all_threads(entry.run);  // as in a plan
    } else {
      entry.run();
    }
    Microseconds time = Clock::now() - start;
    if (!tells_work) time = kMeeting * time + kMeetings;
    time *= entry.handicap;
    const Microseconds worked = entry.handicap * work.elapsed();
    disturbed = std::min(disturbed, time);
    const bool is_disturbed = interruptions() > before || !all_have_cores();
    if (is_disturbed && !tells_work) return;
    if (is_disturbed) time = worked;
    ++rounds;
    second = std::min(second, std::max(best, time));
    best = std::min(best, time);
  }

  bool agrees(int least_rounds) const {
    return best > kLong || (rounds >= least_rounds && second <= kAgree * best);
  }
  bool is_beaten_by(const Contender& other) const {
    return rounds > 1 && best > kBeaten * other.second;
  }
  double microseconds() const { return (rounds > 0 ? best : disturbed).count(); }
};

// Runs all contenders in turn until the fastest is known; null if there are none. The reference, if
// there is one, runs after them; it took `known` when it was first timed.
const Contender* fastest_of(std::vector<Contender>& contenders, Contender* reference,
                            Microseconds known) {
  if (contenders.empty()) return nullptr;
  std::vector<Contender*> left;
  for (Contender& each : contenders) left.push_back(&each);
  const auto all = [&](const auto& holds) {
    return std::ranges::all_of(left, holds) && (!reference || holds(reference));
  };
  const auto begin = Clock::now();
  const auto settled = [&] {
    const auto spent = Clock::now() - begin;
    const auto has_run = [](const Contender* each) { return each->rounds > 0; };
    const int least_rounds = left.size() > 1 || reference ? kLeastRounds : kLeastAlone;
    const auto agrees = [&](const Contender* each) { return each->agrees(least_rounds); };
    const bool is_far = reference && reference->best > kFarFromKnown * known;
    if (spent > (is_far ? kTimeBeside : kTime) && all(has_run)) return true;
    return spent > kPatience || all(agrees);
  };
  do {
    check_interrupts();
    for (Contender* each : left) each->run_once();
    if (reference) reference->run_once();
    const Contender& leader = **std::ranges::min_element(left, {}, &Contender::second);
    std::erase_if(left, [&](const Contender* each) { return each->is_beaten_by(leader); });
  } while (!settled());
  return *std::ranges::min_element(left, {}, &Contender::microseconds);
}

Contender contender(const char* name, Contest::Entry entry) {
  const bool tells_work = threads() == 1 || entry.loops_only;
  return {name, std::move(entry), tells_work};
}

// Adds the named implementations that take the problem, ready to run.
void add_contenders(std::vector<Contender>& contenders, const Contest& contest,
                    const std::vector<const char*>& names) {
  for (const char* implementation : names) {
    auto entry = contest.entry(implementation, !contenders.empty());
    if (!entry) continue;
    contenders.push_back(contender(implementation, *std::move(entry)));
  }
}

bool takes_part(const Contest& contest, const std::string& implementation) {
  const auto has = [&](const auto& names) {
    return std::ranges::find(names, implementation) != names.end();
  };
  return has(contest.implementations) || has(contest.others);
}

// The measurements in a file, one per line: <problem> TAB <implementation> TAB <microseconds>. All
// models of this process share them, because reading 22,000 lines takes 25 ms. Appended lines are
// read when a problem is asked for. A problem with a broken line is measured again.
class Measurements {
 public:
  static std::optional<Tuner::Choice> find(const std::string& path, const std::string& problem) {
    static std::map<std::string, Measurements> files;
    static ForkMutex mutex([] { abandon(files); });
    if (path.empty()) return std::nullopt;
    const std::lock_guard lock(mutex);
    Measurements& file = files[path];
    file.read_on(path);
    const auto found = file.choices_.find(problem);
    return found == file.choices_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  void read_on(const std::string& path) {
    std::string content = read_own_file(path, read_ - std::ssize(last_)).value_or(std::string());
    if (!content.starts_with(last_)) {  // the file is gone, or another one
      *this = {};
      content = read_own_file(path).value_or(std::string());
    }
    std::size_t begin = last_.size();
    for (std::size_t end; (end = content.find('\n', begin)) != content.npos; begin = end + 1) {
      last_ = content.substr(begin, end + 1 - begin);
      read_ += std::ssize(last_);
      add(std::string_view(last_).substr(0, last_.size() - 1));
    }
  }

  void add(std::string_view line) {
    const std::size_t first = line.find('\t'), second = line.rfind('\t');
    if (first == line.npos || first == second) return;
    // Old systems have no std::from_chars for this.
    std::istringstream number{std::string(line.substr(second + 1))};
    number.imbue(std::locale::classic());
    double microseconds = 0;
    number >> std::noskipws >> microseconds;
    if (!number || number.peek() != EOF) return;
    // Nor is anything below the normal numbers a time: readers of numbers differ in those.
    if (!std::isfinite(microseconds) || microseconds < std::numeric_limits<double>::min()) return;
    choices_[std::string(line.substr(0, first))] = {
        std::string(line.substr(first + 1, second - first - 1)), microseconds};
  }

  std::unordered_map<std::string, Tuner::Choice> choices_;
  std::int64_t read_ = 0;
  std::string last_;  // the last line that was read
};

}  // namespace

Tuner::Tuner(Timing timing, std::string path, Known given,
             std::function<void(const std::string&)> told)
    : timing_(timing), path_(std::move(path)), given_(std::move(given)), told_(std::move(told)) {}

// The key of a contest's times. It adds the instruction set, the number of threads, and whether all
// implementations were timed or only those that estimates left open.
std::string Tuner::key_of(const Contest& contest) const {
  return text(isa_name(isa()), " ", at::get_num_threads(), times_all() ? " all " : " ",
              contest.name);
}

Tuner Tuner::without_timing() const {
  Tuner tuner(Timing::kNothing, "", {});
  tuner.of_layers_ = of_layers_;
  return tuner;
}

Tuner Tuner::anew() const { return {timing_, path_, given_, told_}; }

std::optional<Tuner::Choice> Tuner::best(const Contest& contest) {
  const auto choice = found(contest);
  if (choice && !contest.layer.empty()) of_layers_[contest.layer] = choice->implementation;
  return choice;
}

std::optional<Tuner::Choice> Tuner::found(const Contest& contest) {
  const std::string name = key_of(contest);
  if (const auto found = known_.find(name); found != known_.end()) return found->second;
  const auto takes_part = [&](const Choice& choice) {
    return graph::takes_part(contest, choice.implementation);
  };
  if (enabled()) {  // estimates are the same each time
    const auto found = Measurements::find(path_, name);
    if (found && takes_part(*found)) return known_[name] = found;
  }
  if (const auto found = given_.find(name); found != given_.end()) {
    if (!found->second || takes_part(*found->second)) return known_[name] = found->second;
  }
  if (enabled()) return keep(contest, measured(contest));
  const auto like = of_layers_.find(contest.layer);
  const char* preferred = like == of_layers_.end() ? nullptr : like->second.c_str();
  const char* estimated = contest.estimated(preferred);
  return known_[name] = estimated ? std::optional(Choice{estimated, 0}) : std::nullopt;
}

std::optional<Tuner::Choice> Tuner::keep(const Contest& contest,
                                         const std::optional<Measured>& measured) {
  const std::string name = key_of(contest);
  if (!measured) return known_[name] = std::nullopt;
  const Choice& choice = measured->choice;
  if (measured->lasts) append(name, choice);
  if (!contest.layer.empty()) of_layers_[contest.layer] = choice.implementation;
  return known_[name] = choice;
}

void Tuner::append(const std::string& name, const Choice& choice) const {
  if (path_.empty()) return;
  append_to_own_file(path_,
                     text(name, '\t', choice.implementation, '\t', choice.microseconds, '\n'));
}

std::optional<Tuner::Measured> Tuner::measured(const Contest& contest) {
  tell(contest.words);
  std::vector<Contender> contenders;
  add_contenders(contenders, contest, contest.implementations);
  std::optional<Contest::Reference> known;
  if (contest.reference) known = contest.reference();
  std::optional<Contender> reference;
  if (known) reference = contender("reference", known->entry);
  Contender* beside = reference ? &*reference : nullptr;
  const Microseconds known_time{known ? known->microseconds : 0};
  const Contender* best = fastest_of(contenders, beside, known_time);
  if (!contest.others.empty() && !(best && best->microseconds() < contest.expected)) {
    if (best) contenders = {*best};
    add_contenders(contenders, contest, contest.others);
    best = fastest_of(contenders, beside, known_time);
  }
  if (!best) return std::nullopt;
  using Reference = Contest::Reference;
  const double measure =
      beside ? Reference::kHandicap * known_time.count() / beside->microseconds() : 1;
  // Times from a busy machine are not kept for other processes.
  const bool lasts = best->rounds > 0 && (!beside || beside->rounds > 0);
  return Measured{{best->implementation, measure * best->microseconds()}, lasts};
}

const std::vector<Tuner::Choice>& Tuner::all(const Contest& contest) {
  std::vector<Choice>& choices = compared_[key_of(contest)];
  if (!enabled() || !choices.empty()) return choices;
  tell(contest.words);
  std::vector<Contender> contenders;
  add_contenders(contenders, contest, contest.implementations);
  add_contenders(contenders, contest, contest.others);
  for (Contender& each : contenders) {
    check_interrupts();
    for (int round = 0; round < kLeastRounds; ++round) each.run_once();
    choices.push_back({each.implementation, each.microseconds()});
  }
  return choices;
}

void Tuner::tell(const std::string& words) {
  if (!told_) return;
  has_told_ = true;
  told_(words);
}

void Tuner::finish_plan() {
  // Most are for sizes that never come again; those that do have a plan, or a line in the file.
  constexpr std::size_t kMost = 8192;
  if (known_.size() > kMost) known_.clear();
  if (compared_.size() > kMost) compared_.clear();
  if (std::exchange(has_told_, false)) told_("");
}

}  // namespace torch_blocked::graph
