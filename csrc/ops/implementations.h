// The list of implementations of a family of problems (convolution, pooling, ...). A row says all
// there is to know about one implementation. Nothing outside the lists compares names.
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

// Properties of an implementation that its callers may ask for.
struct Traits {
  // dst may be the residual's memory: each value of the residual is read before dst is written
  // there.
  bool sums_in_place = false;
  bool gathers_channels = false;  // it can read input channels from several tensors, in any order
  bool any_format = false;   // its estimate also holds if src and dst are not in one blocked format
  bool last_resort = false;  // so slow that nobody times it if another takes the problem
  // Other estimates compare reliably with this one, so it is timed only if no estimate is lower.
  // Another implementation was estimated to be faster on 407 float32 layers in 16c. One of them
  // was slower, by 8 %.
  bool yardstick = false;
  // It runs only if it is forced or was measured to be fastest. It is timed if its estimate is
  // the lowest.
  bool only_measured = false;
  bool in_rows = false;  // its plans can run a few rows at a time
};

// Whether implementations may run that make fewer products and larger errors than a plain sum of
// all products. TORCH_BLOCKED_WINOGRAD=0 turns them off.
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
  // Why it does not take a problem, as words that follow its name: "is for ..." or the limit that
  // it has. Null if it takes the problem, or if only an attempt can tell. The list asks this
  // before plan() and estimate(), which do not ask again.
  const char* (*refuses)(const Problem& problem) = [](const Problem&) -> const
      char* { return nullptr; };
  // The problem made ready to run; nothing if the attempt fails. `fails` then says why.
  std::optional<Plan> (*plan)(const Problem& problem);
  const char* fails = "has no kernel for it";
  // Microseconds for a problem, estimated from its sizes, as if one thread did all of the work.
  // It is more if the number of threads leaves some of them idle. Either all rows of a list have
  // an estimate or none has. Without estimates the first row that takes a problem runs it.
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

// The part of a list that does not depend on the types of problem and plan: the names, the forced
// implementation, and the one that ran last.
class Family {
 public:
  Family(const char* name, std::vector<const char*> names);
  Family(const Family&) = delete;
  Family& operator=(const Family&) = delete;

  const char* name() const { return name_; }
  const std::vector<const char*>& names() const { return names_; }
  // From now on only this implementation runs problems. Those that it cannot run raise
  // NotImplementedError. "" allows all implementations again. Raises ValueError for an unknown
  // name.
  void force(const std::string& implementation);
  // The implementation that ran this thread's last problem.
  const char* last() const;
  void set_last(const char* implementation) const;

  // Raises the error of a forced implementation that cannot run a problem.
  [[noreturn]] void fail_forced(const char* implementation, const std::string& problem) const;

 protected:
  // Fails if some rows have an estimate and some have none, which is a mistake in the source.
  void check_estimates(std::size_t count) const;
  // The place of a name in the list. Raises ValueError in the name of `op` if it is unknown.
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
  // The forced row; null if all may run.
  const Row* forced() const {
    const int place = forced_place();
    return place < 0 ? nullptr : &rows_[static_cast<std::size_t>(place)];
  }

  // A row's plan of a problem; nothing if it does not take the problem.
  static std::optional<Plan> plan(const Row& row, const Problem& problem) {
    return Ask::plan(row, problem);
  }
  // A row's estimate; kNever if it does not take the problem.
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
  // All rows that have no plan for a problem, and why.
  std::vector<Refusal> refusals(const Problem& problem) const {
    std::vector<Refusal> all;
    for (const Row& row : rows_) {
      if (!plan(row, problem)) all.push_back({row.name, refusal(row, problem)});
    }
    return all;
  }

  // The plan of the implementation with the lowest estimate among those that have one.
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

  // The lowest estimate of the rows that may run without being measured.
  double least_estimate(const Problem& problem) const {
    double least = kNever;
    for (const Row& row : rows_) {
      if (!row.traits.only_measured) least = std::min(least, estimate(row, problem));
    }
    return least;
  }

  // The plan by `only`, or by the fastest if `only` is null. describe() gives the problem in
  // words, for the error if `only` cannot run it.
  template <typename Describe>
  std::optional<Named> choose(const Problem& problem, const Row* only, Describe&& describe) const {
    if (!only) return fastest(problem);
    if (auto made = plan(*only, problem)) return Named{only->name, std::move(*made)};
    fail_forced(only->name, describe());
  }

 private:
  // The rows that may run a problem without being measured, the fastest first.
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

// All families.
const std::vector<Family*>& families();
// Raises ValueError for an unknown name.
Family& family(const std::string& name);

// A text that changes whenever measured times may no longer hold: the names in all lists, a hash of
// the sources of the kernels and of the ops, oneDNN's version, and whether there may be fewer
// products.
std::string fingerprint();

}  // namespace torch_blocked
