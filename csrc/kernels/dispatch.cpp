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

namespace {

const Kernels& table_of(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
    case Isa::kAmx:
      return AVX512::table;
    case Isa::kAvx2:
      return AVX2::table;
    case Isa::kDefault:
      return DEFAULT::table;
  }
  __builtin_unreachable();
}

}  // namespace

const Kernels& kernels() { return table_of(isa()); }

const Kernels& kernels_for(std::int64_t block) {
  const bool too_wide = isa() >= Isa::kAvx512 && block < 16;
  return table_of(too_wide ? Isa::kAvx2 : isa());
}

}  // namespace torch_blocked::kernels
