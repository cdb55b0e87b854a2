// The implementations of a family of problems (convolution, reorder, ...) are one list, in which a
// row says all there is to know of one. Nothing outside of the lists compares names.
#pragma once

#include <algorithm>
#include <atomic>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/estimated_threads.h"

namespace torch_blocked {

// What others may ask of an implementation.
struct Traits {
  // dst may be the residual's memory: each value of that is read before dst is written there.
  bool sums_in_place = false;
  bool gathers_channels = false;  // it can read input channels from several tensors, in any order
  bool any_format = false;   // its estimate holds where src and dst are not in one blocked format
  bool last_resort = false;  // so slow that nobody times it where another takes the problem
  // The estimates of others say whether they are faster than it, so that it is timed only where no
  // estimate is less: of 407 float32 layers in 16c on which another was estimated to be faster, one
  // was slower, by 8 %.
  bool yardstick = false;
  // It runs only if it is forced or was measured to be fastest, and is timed where its estimate is
  // less than those of all others.
  bool only_measured = false;
  bool in_rows = false;  // its plans may run for some rows at a time
};

// Whether implementations may run that make fewer products and larger errors than a sum of all has:
// not with TORCH_BLOCKED_WINOGRAD=0.
bool fewer_products_allowed();
inline constexpr const char* kFewerProductsRefused = "is turned off by TORCH_BLOCKED_WINOGRAD=0";

// The estimate of an implementation that does not take a problem.
inline constexpr double kNever = std::numeric_limits<double>::infinity();

// An implementation that does not take a problem, and why, in words.
struct Refusal {
  const char *implementation, *why;
};

// A row of a list. It is one constant in the file of its code, and its list.inc names it.
template <typename Problem, typename Plan>
struct Implementation {
  const char* name;
  // Why it does not take a problem, in words after its name: "is for" what it was made for, or the
  // limit that it has. Null where it takes the problem, or where only an attempt tells. The list
  // asks it before plan() and estimate(), which do not ask again.
  const char* (*refuses)(const Problem& problem) = [](const Problem&) -> const
      char* { return nullptr; };
  // The problem made ready to run; nothing where the attempt fails, for which `fails` has the
  // words.
  std::optional<Plan> (*plan)(const Problem& problem);
  const char* fails = "has no kernel for it";
  // Microseconds for any problem, estimated from its sizes: as if one thread did the work of all,
  // and more where the number of threads leaves some of them idle. All rows of a list have one, or
  // none has: then the first that takes a problem runs it.
  double (*estimate)(const Problem& problem) = nullptr;
  Traits traits = {};
};

// How a list asks a row: its refusal, and then the rest.
template <typename Problem, typename Plan>
struct AskOnce {
  using Row = Implementation<Problem, Plan>;

  static const char* refusal(const Row& row, const Problem& problem) {
    return row.refuses(problem);
  }
  static std::optional<Plan> plan(const Row& row, const Problem& problem) {
    return row.refuses(problem) ? std::nullopt : row.plan(problem);
  }
  static double estimate(const Row& row, const Problem& problem) {
    return row.refuses(problem) ? kNever : row.estimate(problem);
  }
};

// A list without its types of problem and plan: its names, the one that is forced, and the one that
// ran last.
class Family {
 public:
  Family(const char* name, std::vector<const char*> names);
  Family(const Family&) = delete;
  Family& operator=(const Family&) = delete;

  const char* name() const { return name_; }
  const std::vector<const char*>& names() const { return names_; }
  // From now on problems run by this implementation only, and raise NotImplementedError where it
  // cannot; "" allows all of them again. Raises ValueError for an unknown name.
  void force(const std::string& implementation);
  // What this thread's last problem ran by.
  const char* last() const;
  void set_last(const char* implementation) const;

  // Raises the error for a forced implementation that cannot run a problem.
  [[noreturn]] void fail_forced(const char* implementation, const std::string& problem) const;

 protected:
  // A list in which some rows have an estimate and some have none is a mistake in its source.
  void check_estimates(std::size_t count) const;
  // The place of a name in the list. Raises ValueError, said by `op`, for an unknown one.
  std::size_t place(const char* op, const std::string& implementation) const;
  int forced_place() const { return forced_; }  // -1: none

 private:
  const char* name_;
  std::vector<const char*> names_;
  std::size_t index_;  // in families()
  std::atomic<int> forced_ = -1;
};

template <typename Problem, typename Plan, typename Ask = AskOnce<Problem, Plan>>
class Implementations : public Family {
 public:
  using Row = Implementation<Problem, Plan>;
  struct Named {
    const char* name;
    Plan plan;
  };

  Implementations(const char* family, std::vector<Row> rows)
      : Family(family, names_of(rows)), rows_(std::move(rows)) {
    const auto estimates =
        std::ranges::count_if(rows_, [](const Row& row) { return row.estimate; });
    check_estimates(static_cast<std::size_t>(estimates));
  }

  const std::vector<Row>& rows() const { return rows_; }
  // Raises ValueError for an unknown name.
  const Row& row(const std::string& name) const { return rows_[place(this->name(), name)]; }
  // What force() left; null: all.
  const Row* forced() const {
    const int place = forced_place();
    return place < 0 ? nullptr : &rows_[static_cast<std::size_t>(place)];
  }

  // What a row makes of a problem; nothing if it does not take it.
  static std::optional<Plan> plan(const Row& row, const Problem& problem) {
    return Ask::plan(row, problem);
  }
  // kNever if it does not take it.
  static double estimate(const Row& row, const Problem& problem) {
    const EstimatedThreads threads;
    return Ask::estimate(row, problem);
  }
  // Why a row that has no plan for a problem has none.
  static const char* refusal(const Row& row, const Problem& problem) {
    const char* why = Ask::refusal(row, problem);
    return why ? why : row.fails;
  }
  // Whether a row says at once that it does not take a problem.
  static bool refuses(const Row& row, const Problem& problem) { return Ask::refusal(row, problem); }
  // Those that have no plan for a problem.
  std::vector<Refusal> refusals(const Problem& problem) const {
    std::vector<Refusal> all;
    for (const Row& row : rows_) {
      if (!plan(row, problem)) all.push_back({row.name, refusal(row, problem)});
    }
    return all;
  }

  // The fastest implementation by estimates that has a plan.
  std::optional<Named> fastest(const Problem& problem) const {
    std::optional<Named> found;
    const auto takes = [&](const Row& row) {
      if (auto made = plan(row, problem)) found = Named{row.name, std::move(*made)};
      return found.has_value();
    };
    if (rows_.front().estimate) {
      std::ranges::any_of(by_estimate(problem),
                          [&](const auto& pair) { return takes(*pair.second); });
    } else {
      std::ranges::any_of(rows_, takes);
    }
    return found;
  }

  // Of those that may run without having been measured.
  double least_estimate(const Problem& problem) const {
    double least = kNever;
    for (const Row& row : rows_) {
      if (!row.traits.only_measured) least = std::min(least, estimate(row, problem));
    }
    return least;
  }

  // The plan by `only`, or by the fastest if that is null. describe() gives the problem in words,
  // for the error if `only` cannot run it.
  template <typename Describe>
  std::optional<Named> choose(const Problem& problem, const Row* only, Describe&& describe) const {
    if (!only) return fastest(problem);
    if (auto made = plan(*only, problem)) return Named{only->name, std::move(*made)};
    fail_forced(only->name, describe());
  }

 private:
  // Those that may run a problem without having been measured, the fastest first.
  std::vector<std::pair<double, const Row*>> by_estimate(const Problem& problem) const {
    std::vector<std::pair<double, const Row*>> rows;
    rows.reserve(rows_.size());
    for (const Row& row : rows_) {
      const double microseconds = row.traits.only_measured ? kNever : estimate(row, problem);
      if (microseconds < kNever) rows.emplace_back(microseconds, &row);
    }
    std::ranges::stable_sort(rows, {}, [](const auto& pair) { return pair.first; });
    return rows;
  }

  static std::vector<const char*> names_of(const std::vector<Row>& rows) {
    std::vector<const char*> names;
    for (const Row& row : rows) names.push_back(row.name);
    return names;
  }

  std::vector<Row> rows_;
};

// All families that there are.
const std::vector<Family*>& families();
// Raises ValueError for an unknown name.
Family& family(const std::string& name);

// Tells one build from another where measured times are concerned, in words: the names in all
// lists, a hash of the sources of the kernels and of the ops, oneDNN's version, and whether there
// may be fewer products.
std::string fingerprint();

}  // namespace torch_blocked
