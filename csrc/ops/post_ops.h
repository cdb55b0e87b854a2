// Epilogues of our kernels after oneDNN's: as its post-ops, or in a pass of their own.
#pragma once

#include <cstdint>
#include <oneapi/dnnl/dnnl.hpp>

#include "kernels/vector/epilogue.h"

namespace torch_blocked {

// Appends the activation, if it is one.
void append_activation(dnnl::post_ops& post_ops, const kernels::Activation& activation);

// Whether that post-op gives ATen's values. oneDNN's ReLU and clip take the maximum as x86 does, of
// which one operand that is NaN gives the other; its Mish subtracts nearly equal squares, so that
// below -16.6, where the value is -1e-6, nothing is left.
bool is_as_in_aten(const kernels::Activation& activation);

// The epilogue over `count` values of dst, on all threads. The residual may be null, but not dst.
void finish(const kernels::Epilogue& epilogue, const float* residual, float* dst,
            std::int64_t count);

}  // namespace torch_blocked
