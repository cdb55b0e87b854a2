// Runs the steps of a recurrent layer, in one or both directions. The products with the inputs are
// already computed. h of each step follows from them and from h of the step before. float32.
//
//   products = weight_hh h + bias_hh
//   h, c     = cell(gates, products, h, c)     (kernels/matrix/recurrent.h)
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "kernels/matrix/recurrent.h"

namespace torch_blocked {

using kernels::Cell;

// gates: [N, T, directions, gates of the cell, hidden] if the batch comes first, else [T, N, ...].
// dst: [N, T, directions, hidden], likewise. The second direction begins with the last step.
struct RecurrentProblem {
  Cell cell;
  std::int64_t batch, steps, hidden, directions;
  bool batch_first;
  bool has_bytes;  // all weights are bytes
};

// The weights of one direction: [gates * hidden, hidden], and a bias [gates * hidden] or undefined.
struct RecurrentWeights {
  at::Tensor weight, bias;
  at::Tensor scales = {};  // [gates * hidden] float32, if the weights are int8: what they stand for

  at::Tensor numbers() const;  // float32
};

struct RecurrentBuffers {
  const float* gates;
  const float *h, *c;    // [directions, N, hidden], before the first step; c of an LSTM only
  const float* weights;  // packed
  float* dst;
  float *last_h, *last_c;  // as h and c, after the last step
};

// A problem made ready to run, by one thread at a time or by all threads going through its loops
// together.
struct RecurrentPlan {
  std::string weights_format;  // the name of what pack() makes
  std::function<at::Tensor(const std::vector<RecurrentWeights>& of_directions)> pack;
  std::function<void(const RecurrentBuffers& buffers)> run;
};

RecurrentPlan plan_recurrent(const RecurrentProblem& problem);

}  // namespace torch_blocked
