// Which table of kernels runs: that of the CPU's best instruction set, within its limits.
#include "format/errors.h"
#include "kernels/kernels.h"
#include "runtime/isa.h"

namespace torch_blocked::kernels {

// CMake says which sets are built: TORCH_BLOCKED_SETS.
#define NO_SET(isa)                          \
  namespace isa {                            \
  constexpr const Kernels* kTable = nullptr; \
  }
#define SET(isa)                            \
  namespace isa {                           \
  extern const Kernels table;               \
  constexpr const Kernels* kTable = &table; \
  }
#ifdef TORCH_BLOCKED_HAS_DEFAULT
SET(DEFAULT)
#else
NO_SET(DEFAULT)
#endif
#ifdef TORCH_BLOCKED_HAS_AVX2
SET(AVX2)
#else
NO_SET(AVX2)
#endif
#ifdef TORCH_BLOCKED_HAS_AVX512
SET(AVX512)
#else
NO_SET(AVX512)
#endif

namespace {

const Kernels* table_of(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
    case Isa::kAmx:
      return AVX512::kTable;
    case Isa::kAvx2:
      return AVX2::kTable;
    case Isa::kDefault:
      return DEFAULT::kTable;
  }
  __builtin_unreachable();
}

const Kernels& built_table(Isa isa) {
  const Kernels* table = table_of(isa);
  if (!table) [[unlikely]] {
    fail_not_implemented("kernels", "an instruction set that this build has", isa_name(isa),
                         "build the others, too: make extension");
  }
  return *table;
}

}  // namespace

const Kernels& kernels() { return built_table(isa()); }

const Kernels& kernels_for(std::int64_t block) {
  const bool too_wide = isa() >= Isa::kAvx512 && block < 16;
  return built_table(too_wide ? Isa::kAvx2 : isa());
}

}  // namespace torch_blocked::kernels
