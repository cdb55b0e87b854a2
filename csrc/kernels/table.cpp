// The table of one instruction set's kernels, from the rows of list.inc.
#include "kernels/kernels.h"
#include "kernels/vector/lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

#define KERNEL(result, name, arguments) result name arguments;
#define CONSTANT(type, name) extern const type name;
#ifdef CPU_CAPABILITY_DEFAULT
#define SIMD_CONSTANT(type, name)
#endif
#ifndef CPU_CAPABILITY_AVX512
#define AVX512_KERNEL(result, name, arguments)
#endif
#include "kernels/list.inc"

extern const Kernels table;
const Kernels table{
#define KERNEL(result, name, arguments) .name = name,
#define CONSTANT(type, name) .name = &name,
#ifdef CPU_CAPABILITY_DEFAULT
#define SIMD_CONSTANT(type, name) .name = nullptr,
#endif
#ifndef CPU_CAPABILITY_AVX512
#define AVX512_KERNEL(result, name, arguments) .name = nullptr,
#endif
#include "kernels/list.inc"
    .width = kWidth};

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
