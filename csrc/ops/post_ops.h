// Epilogues for oneDNN's kernels: as its post-ops, or as a pass of our own after them.
#pragma once

#include <cstdint>
#include <oneapi/dnnl/dnnl.hpp>

#include "kernels/vector/epilogue.h"

namespace torch_blocked {

// Appends the activation unless it is kNone.
void append_activation(dnnl::post_ops& post_ops, const kernels::Activation& activation);

// Whether the post-op gives ATen's values. oneDNN's ReLU and clip take x86's maximum, which drops a
// NaN and returns the other operand. Its Mish subtracts nearly equal squares: below -16.6, where
// the value is -1e-6, nothing is left.
bool is_as_in_aten(const kernels::Activation& activation);

// Applies the epilogue to `count` values of dst, on all threads. The residual may be null; it must
// not be dst.
void finish(const kernels::Epilogue& epilogue, const float* residual, float* dst,
            std::int64_t count);

}  // namespace torch_blocked
