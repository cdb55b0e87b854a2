// Our descriptors and oneDNN's, each made of the other.
#pragma once

#include <ATen/core/Tensor.h>

#include <oneapi/dnnl/dnnl.hpp>
#include <optional>

#include "torch_blocked/descriptor.h"

namespace torch_blocked {

// Nothing where oneDNN's API cannot make it: it takes a tag that it knows or strides, not both
// strides and blocks, and neither padding nor an offset of one's own.
std::optional<dnnl::memory::desc> onednn_md(const Descriptor& descriptor);

// Nothing for what is not strides and blocks, as weights that only one primitive can read are not.
std::optional<Descriptor> descriptor_of(const dnnl::memory::desc& md);

// torch's type for a descriptor's. The zero descriptor has none.
at::ScalarType scalar_type(DataType data_type);

}  // namespace torch_blocked
