// Converts our descriptors to oneDNN's and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <oneapi/dnnl/dnnl.hpp>
#include <optional>

#include "torch_blocked/descriptor.h"

namespace torch_blocked {

// Nothing if oneDNN's API cannot make it. The API takes a known tag or strides, but not strides
// with blocks, and no padding or offset.
std::optional<dnnl::memory::desc> onednn_md(const Descriptor& descriptor);

// Nothing for formats other than strides and blocks, such as weights that only one primitive can
// read.
std::optional<Descriptor> descriptor_of(const dnnl::memory::desc& md);

// torch's type for a descriptor's. The zero descriptor has none.
at::ScalarType scalar_type(DataType data_type);

}  // namespace torch_blocked
