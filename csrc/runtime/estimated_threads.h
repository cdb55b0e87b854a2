// The number of threads that estimates are made for.
#pragma once

#include <ATen/Context.h>

namespace torch_blocked {

// Under torch.use_deterministic_algorithms(True) neither times nor the number of threads may decide
// which kernels run, because kernels differ in their last bits.
inline bool is_deterministic() { return at::globalContext().deterministicAlgorithms(); }

// While an object lives and is_deterministic(), threads() returns a fixed number. Only for
// estimates: nothing may run on threads meanwhile.
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
