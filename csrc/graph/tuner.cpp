// Times the implementations of a problem on its real shape.
#include <ATen/Parallel.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <limits>
#include <mutex>
#include <unordered_map>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "format/errors.h"
#include "graph/plan.h"
#include "runtime/isa.h"
#include "runtime/threads.h"

namespace torch_blocked::graph {
namespace {

using Clock = std::chrono::steady_clock;

// Rounds until this much time has gone, at least kLeastRounds: the best of a few is within some
// percent of the truth, and one model has up to a hundred problems.
constexpr std::chrono::microseconds kTime{1500};
constexpr int kLeastRounds = 3;
// A run that takes this long tells enough; huge images would be timed for minutes.
constexpr std::chrono::milliseconds kLong{200};
// When others use the cores too: how long to wait for rounds without them.
constexpr std::chrono::milliseconds kPatience{25};
// An implementation that is not loops_only must be faster by this factor: threads wait for each
// other before and after it, and for long if one of them has lost its core.
constexpr double kMeeting = 1.05;

// How often the system took a core away from this process.
long interruptions() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_nivcsw;
}

// Weights come from memory in a whole model: those of ResNet-50 for Winograd are 180 MB. In cache
// the 9 MB of one of its layers seem to cost nothing, and are 0.2 to 0.4 ms of 1.1 in truth.
void evict([[maybe_unused]] const at::Tensor& tensor) {
#if defined(__SSE2__)
  constexpr std::size_t kLine = 64;
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  for (std::size_t i = 0; i < tensor.nbytes(); i += kLine) _mm_clflush(data + i);
  _mm_mfence();
#endif
}

struct Measurement {
  double microseconds = std::numeric_limits<double>::infinity();
  bool disturbed = true;
};

Measurement measure(const Contest::Entry& entry) {
  entry.run();  // generated code, workspaces, caches
  Measurement alone, any;
  const auto begin = Clock::now();
  std::chrono::duration<double, std::micro> spent{0};
  for (int rounds = 0; rounds < kLeastRounds || spent < kTime;) {
    evict(entry.weights);
    const long before = interruptions();
    const auto start = Clock::now();
    entry.run();
    const std::chrono::duration<double, std::micro> time = Clock::now() - start;
    any.microseconds = std::min(any.microseconds, time.count());
    if (interruptions() == before) {
      alone = {std::min(alone.microseconds, time.count()), false};
      spent += time;
      ++rounds;
      if (spent > kLong) break;
    } else if (Clock::now() - begin > kPatience) {
      break;
    }
  }
  return alone.disturbed ? any : alone;
}

// What the lines of a file say, <problem> TAB <implementation> TAB <microseconds>, read once by all
// models of this process: 22,000 lines take 25 ms. What is appended is read when a problem is asked
// for; a line that is broken is measured again.
class Measurements {
 public:
  static std::optional<Tuner::Choice> find(const std::string& path, const std::string& problem) {
    static std::mutex mutex;
    static std::map<std::string, Measurements> files;
    if (path.empty()) return std::nullopt;
    const std::lock_guard lock(mutex);
    Measurements& file = files[path];
    file.read_on(path);
    const auto found = file.choices_.find(problem);
    return found == file.choices_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  void read_on(const std::string& path) {
    std::ifstream file(path);
    std::string last(last_.size(), '\0');
    file.seekg(read_ - static_cast<std::streamoff>(last.size()));
    file.read(last.data(), static_cast<std::streamsize>(last.size()));
    if (!file || last != last_) {  // it is gone, or another
      *this = {};
      file.clear();
      file.seekg(0);
    }
    for (std::string line; std::getline(file, line) && !file.eof();) {
      last_ = line + "\n";
      read_ += static_cast<std::streamoff>(last_.size());
      add(line);
    }
  }

  void add(const std::string& line) {
    const std::size_t first = line.find('\t'), second = line.rfind('\t');
    if (first == line.npos || first == second) return;
    Tuner::Choice choice{line.substr(first + 1, second - first - 1), std::atof(&line[second + 1])};
    if (choice.microseconds > 0) choices_[line.substr(0, first)] = choice;
  }

  std::unordered_map<std::string, Tuner::Choice> choices_;
  std::streamoff read_ = 0;
  std::string last_;  // line that was read
};

}  // namespace

Tuner::Tuner(bool enabled, std::string path, Known given)
    : enabled_(enabled), path_(std::move(path)), given_(std::move(given)) {}

std::optional<Tuner::Choice> Tuner::best(const Contest& contest) {
  const std::string name = text(isa_name(isa()), " ", at::get_num_threads(), " ", contest.name);
  if (const auto found = known_.find(name); found != known_.end()) return found->second;
  const auto takes_part = [&](const Choice& choice) {
    return std::ranges::find(contest.implementations, choice.implementation) !=
           contest.implementations.end();
  };
  if (const auto found = Measurements::find(path_, name); found && takes_part(*found)) {
    return known_[name] = found;
  }
  if (const auto found = given_.find(name); found != given_.end()) {
    if (!found->second || takes_part(*found->second)) return known_[name] = found->second;
  }
  if (enabled_) return known_[name] = measured(contest, name);
  const char* estimated = contest.estimated();
  return known_[name] = estimated ? std::optional(Choice{estimated, 0}) : std::nullopt;
}

std::optional<Tuner::Choice> Tuner::measured(const Contest& contest, const std::string& name) {
  show_progress(contest.words);
  std::optional<Choice> best;
  bool disturbed = false;
  for (const char* implementation : contest.implementations) {
    const auto entry = contest.entry(implementation, best.has_value());
    if (!entry) continue;
    Measurement time = measure(*entry);
    if (threads() > 1 && !entry->loops_only) time.microseconds *= kMeeting;
    disturbed |= time.disturbed;
    if (!best || time.microseconds < best->microseconds) {
      best = Choice{implementation, time.microseconds};
    }
  }
  if (best && !disturbed && !path_.empty()) {  // a busy machine's word is good for today only
    std::ofstream(path_, std::ios::app)
        << name << '\t' << best->implementation << '\t' << best->microseconds << '\n';
  }
  return best;
}

// On a terminal, one line that is written over; a problem takes some 20 ms.
void Tuner::show_progress(const std::string& words) {
  if (isatty(STDERR_FILENO) == 0) return;
  const std::string line = text("torch_blocked: timing ", ++measured_, ": ", words);
  std::fprintf(stderr, "\r%.78s\x1b[K\r", line.c_str());
}

}  // namespace torch_blocked::graph
