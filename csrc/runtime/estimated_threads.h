// The number of threads that estimates are made for.
#pragma once

#include <ATen/Context.h>

namespace torch_blocked {

// Under torch.use_deterministic_algorithms(True) neither times nor the number of threads may decide
// which kernels run, as these differ in their last bits.
inline bool is_deterministic() { return at::globalContext().deterministicAlgorithms(); }

// While one lives and is_deterministic(), threads() is the same number whatever it is otherwise:
// for estimates, in which nothing runs on threads.
class EstimatedThreads {
 public:
  EstimatedThreads();
  EstimatedThreads(const EstimatedThreads&) = delete;
  EstimatedThreads& operator=(const EstimatedThreads&) = delete;
  ~EstimatedThreads();

 private:
  int before_;
};

}  // namespace torch_blocked
