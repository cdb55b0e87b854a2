// Squeeze and excitation: multiplies each channel by a gate. Small layers compute the gates from
// the means of all channels. float32 or bfloat16, in a blocked format or channels-last; weights are
// float32.
//
//   means [N, C] = mean of src [N, C, *spatial] over the spatial dims
//   gates [N, C] = layers, one after the other: activation(weight * + bias)
//   dst          = epilogue(src * gate(gates))
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "kernels/images/squeeze_excite.h"
#include "kernels/vector/epilogue.h"
#include "ops/blocked.h"

namespace torch_blocked {

using kernels::Activation;
using kernels::Epilogue;
using kernels::Gate;

struct SqueezeExciteLayer {
  at::Tensor weight, bias;  // [O, I, ...ones]; [O] or undefined
  Activation activation;
};

struct SqueezeExciteProblem {
  Dims dims;      // of src and dst
  Format format;  // of both: channels-last or blocked
  struct Layer {
    std::int64_t inputs, outputs;
    Activation activation;
  };
  std::vector<Layer> layers;  // the first takes C inputs, the last has C outputs
  Gate gate;
  Epilogue epilogue;
  at::ScalarType dtype = at::kFloat;  // of src and dst
};

struct SqueezeExciteBuffers {
  const void *src, *residual;  // residual as dst, or null
  const float* weights;        // packed
  void* dst;                   // may be src or residual
};

// A problem made ready to run, by one thread at a time.
struct SqueezeExcitePlan {
  std::string weights_format;  // the name of what pack() makes
  std::function<at::Tensor(const std::vector<SqueezeExciteLayer>& layers)> pack;
  std::function<void(const SqueezeExciteBuffers& buffers)> run;
};

SqueezeExcitePlan plan_squeeze_excite(const SqueezeExciteProblem& problem);

}  // namespace torch_blocked
