// The instruction set in use, for our kernels and for oneDNN alike.
#pragma once

#include <cstdint>
#include <vector>

namespace torch_blocked {

// kAmx is kAvx512 plus AMX tiles for products of bfloat16.
enum class Isa { kDefault, kAvx2, kAvx512, kAmx };

// The best set that the CPU has, limited by TORCH_BLOCKED_MAX_ISA (default, avx2, avx512, amx) and
// by oneDNN's own limit (ONEDNN_MAX_CPU_ISA). Our kernels and oneDNN always use the same set. It is
// fixed at the first call, which also asks the system for permission to use tiles.
Isa isa();

const char* isa_name(Isa isa);

// Channel blocks with fast kernels on this ISA, best first: (16, 8) from AVX-512 on, else (8).
// oneDNN runs 16c as `ref` below AVX-512, and 8c with AVX2 kernels on AVX-512.
std::vector<std::int64_t> native_blocks();

// Whether an instruction sums products of bytes (VNNI) within these limits. The default set does it
// in scalar code.
bool multiplies_bytes();
// Whether bfloat16 kernels run. On AVX-512 they need avx512_bf16; other sets convert.
bool multiplies_bfloats();
// Whether the CPU has instructions for that, so that it is faster than in float32.
bool gains_by_bfloats();
// Whether there is also an instruction that permutes the bytes of a vector in any order.
bool permutes_bytes();

}  // namespace torch_blocked
