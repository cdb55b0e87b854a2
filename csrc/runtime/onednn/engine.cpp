#include "runtime/onednn/engine.h"

#include "runtime/isa.h"
#include "runtime/onednn/primitive_cache.h"

namespace torch_blocked {

const dnnl::engine& engine() {
  static const dnnl::engine cpu = [] {
    isa();  // sets oneDNN's ISA limit, which must come before its first primitive
    bound_primitive_cache();
    return dnnl::engine(dnnl::engine::kind::cpu, 0);
  }();
  return cpu;
}

dnnl::stream& stream() {
  static thread_local dnnl::stream cpu(engine());
  return cpu;
}

}  // namespace torch_blocked
