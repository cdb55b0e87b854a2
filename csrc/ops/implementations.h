// The implementations of a family of problems (convolution, reorder, ...) are one list, in which a
// row says all there is to know of one. Nothing outside of the lists compares names.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <optional>
#include <span>
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

template <typename Problem, typename Plan>
struct Implementation {
  const char* name;
  // The problem made ready to run; nothing if it is not for this implementation.
  std::optional<Plan> (*plan)(const Problem& problem);
  // Microseconds for any problem, estimated from its sizes: as if one thread did the work of all,
  // and more where the number of threads leaves some of them idle. Null: the estimate of the row
  // before.
  double (*estimate)(const Problem& problem) = nullptr;
  Traits traits = {};
  // Why it has no plan for a problem, in words after its name: "is for" what it was made for, or
  // the limit that it has; null if it has a plan, or if only an attempt tells.
  const char* (*refuses)(const Problem& problem) = nullptr;
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
  // The place of a name in the list. Raises ValueError, said by `op`, for an unknown one.
  std::size_t place(const char* op, const std::string& implementation) const;
  int forced_place() const { return forced_; }  // -1: none

 private:
  const char* name_;
  std::vector<const char*> names_;
  std::size_t index_;  // in families()
  std::atomic<int> forced_ = -1;
};

template <typename Problem, typename Plan>
class Implementations : public Family {
 public:
  using Row = Implementation<Problem, Plan>;
  struct Named {
    const char* name;
    Plan plan;
  };

  Implementations(const char* family, std::vector<Row> rows)
      : Family(family, names_of(rows)), rows_(std::move(rows)) {}

  const std::vector<Row>& rows() const { return rows_; }
  // Raises ValueError for an unknown name.
  const Row& row(const std::string& name) const { return rows_[place(this->name(), name)]; }
  // Those that have no plan for a problem.
  std::vector<Refusal> refusals(const Problem& problem) const {
    std::vector<Refusal> all;
    for (const Row& row : rows_) {
      if (row.plan(problem)) continue;
      const char* why = row.refuses ? row.refuses(problem) : nullptr;
      all.push_back({row.name, why ? why : "has no kernel for it"});
    }
    return all;
  }
  // What force() left; null: all.
  const Row* forced() const {
    const int place = forced_place();
    return place < 0 ? nullptr : &rows_[static_cast<std::size_t>(place)];
  }

  // The fastest implementation by estimates that has a plan; plan_by(row, problem) makes it.
  template <typename PlanBy>
  std::optional<Named> fastest(const Problem& problem, PlanBy&& plan_by) const {
    struct Timed {
      double estimate;
      const Row* row;
    };
    std::array<Timed, kMostRows> order;
    std::size_t count = 0;
    estimate_each(problem, [&](const Row& row, double estimate) {
      if (estimate == kNever || row.traits.only_measured) return;
      std::size_t at = count++;
      for (; at > 0 && estimate < order[at - 1].estimate; --at) order[at] = order[at - 1];
      order[at] = {estimate, &row};
    });
    for (std::size_t i = 0; i < count; ++i) {
      if (auto plan = plan_by(*order[i].row, problem)) {
        return Named{order[i].row->name, std::move(*plan)};
      }
    }
    return std::nullopt;
  }

  // Of those that may run without having been measured.
  double least_estimate(const Problem& problem) const {
    double least = kNever;
    estimate_each(problem, [&](const Row& row, double estimate) {
      if (!row.traits.only_measured) least = std::min(least, estimate);
    });
    return least;
  }

  // The plan by `only`, or by the fastest if that is null. describe() gives the problem in words,
  // for the error if `only` cannot run it.
  template <typename Describe>
  std::optional<Named> choose(const Problem& problem, const Row* only, Describe&& describe) const {
    const auto plan_by = [](const Row& row, const Problem& p) { return row.plan(p); };
    if (!only) return fastest(problem, plan_by);
    if (auto plan = only->plan(problem)) return Named{only->name, std::move(*plan)};
    fail_forced(only->name, describe());
  }

 private:
  static constexpr std::size_t kMostRows = 24;

  // f(row, its estimate) for all rows.
  template <typename F>
  void estimate_each(const Problem& problem, F&& f) const {
    const EstimatedThreads threads;
    double estimate = 0;
    for (const Row& row : rows_) {
      if (row.estimate) estimate = row.estimate(problem);
      f(row, estimate);
    }
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
