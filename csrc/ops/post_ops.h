// Epilogues of our kernels as post-ops of oneDNN's.
#pragma once

#include <oneapi/dnnl/dnnl.hpp>

#include "kernels/epilogue.h"

namespace torch_blocked {

// Appends the activation, if it is one.
void append_activation(dnnl::post_ops& post_ops, const kernels::Activation& activation);

}  // namespace torch_blocked
