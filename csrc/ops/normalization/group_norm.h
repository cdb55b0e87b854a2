// Group norm of a blocked tensor, made ready for its dims.
#pragma once

#include <vector>

#include "ops/normalization/chunks.h"
#include "ops/normalization/normalization.h"

namespace torch_blocked {

struct GroupNormProblem {
  Dims dims;
  std::int64_t block;
  at::ScalarType dtype;  // one that norms_take()
  std::int64_t groups;   // divides dims[1]
  double eps;
};

// dst = (src - mean) / sqrt(variance + eps) * weight + bias, with moments over the pixels and the
// channels of each group of each image. weight and bias are [C], or missing. All threads go through
// its loops together, one call at a time. Source: Wu, He, "Group Normalization" (arXiv 1803.08494).
class GroupNorm {
 public:
  GroupNorm(const GroupNormProblem& problem, const Parameter& weight, const Parameter& bias);
  void operator()(const void* src, void* dst);  // dst may be src

  // The statistics of the last call: [N * groups].
  const std::vector<float>& means() const { return means_; }
  const std::vector<float>& rstds() const { return rstds_; }

 private:
  using Channels = std::vector<float>;
  Channels values(const Parameter& parameter, float missing) const;
  // The mean and the squared deviations of each lane of a chunk.
  double* partial(std::int64_t chunk) { return partials_.data() + 2 * chunk * p_.block; }
  void find_moments(std::int64_t group);
  void fill_lanes(std::int64_t chunk, float* mean, float* scale, float* shift) const;

  GroupNormProblem p_;
  Chunks chunks_;
  std::int64_t in_group_, element_;  // channels of a group; bytes of a number
  Channels weight_, bias_;
  std::vector<double> partials_;
  std::vector<float> means_, rstds_;
};

}  // namespace torch_blocked
