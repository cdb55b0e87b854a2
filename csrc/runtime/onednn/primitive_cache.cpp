#include "runtime/onednn/primitive_cache.h"

#include <cstdlib>
#include <oneapi/dnnl/dnnl.hpp>

#include "runtime/fork.h"

namespace torch_blocked {
namespace {

// Enough for the layers of a large model; oneDNN's default is 1024. A U-Net that met 300 sizes held
// 40 MiB more with that.
constexpr int kCapacity = 256;

}  // namespace

void bound_primitive_cache() {
  for (const char* name : {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"}) {
    if (std::getenv(name)) return;
  }
  dnnl::set_primitive_cache_capacity(kCapacity);
}

void forget_primitives() {
  const NoFork no_fork;
  const int capacity = dnnl::get_primitive_cache_capacity();
  dnnl::set_primitive_cache_capacity(0);
  dnnl::set_primitive_cache_capacity(capacity);
}

}  // namespace torch_blocked
