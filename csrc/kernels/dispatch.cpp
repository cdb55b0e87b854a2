#include "kernels/kernels.h"
#include "runtime/isa.h"

namespace torch_blocked::kernels {

namespace DEFAULT {
extern const Kernels table;
}
namespace AVX2 {
extern const Kernels table;
}
namespace AVX512 {
extern const Kernels table;
}

const Kernels& kernels() {
  switch (isa()) {
    case Isa::kAvx512: return AVX512::table;
    case Isa::kAvx2: return AVX2::table;
    case Isa::kDefault: return DEFAULT::table;
  }
  __builtin_unreachable();
}

}  // namespace torch_blocked::kernels
