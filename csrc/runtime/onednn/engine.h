// oneDNN's singletons. No other file makes an engine or a stream.
#pragma once

#include <oneapi/dnnl/dnnl.hpp>

namespace torch_blocked {

const dnnl::engine& engine();

// The calling thread's stream.
dnnl::stream& stream();

}  // namespace torch_blocked
