// The instruction set in use, for our kernels and for oneDNN alike.
#pragma once

#include <cstdint>
#include <vector>

namespace torch_blocked {

// kAmx is kAvx512 and tiles of bfloat16 products (AMX).
enum class Isa { kDefault, kAvx2, kAvx512, kAmx };

// The best set the CPU has, limited by TORCH_BLOCKED_MAX_ISA (default, avx2, avx512, amx) and
// by oneDNN's own limit (ONEDNN_MAX_CPU_ISA): both sides always run the same one. Fixed at first
// call, which asks the system for the state of tiles.
Isa isa();

const char* isa_name(Isa isa);

// Channel blocks with fast kernels on this ISA, best first: (16, 8) from AVX-512 on, else (8).
// oneDNN runs 16c as `ref` below AVX-512, and 8c with AVX2 kernels on AVX-512.
std::vector<std::int64_t> native_blocks();

// Whether an instruction sums products of bytes (VNNI) within these limits; the set for CPUs
// without AVX2 does it in scalar code.
bool multiplies_bytes();
// Whether kernels of bfloat16 run: on AVX-512 that takes avx512_bf16, other sets convert.
bool multiplies_bfloats();
// Whether, beside sums of bytes, one puts the bytes of a vector into any order.
bool permutes_bytes();

}  // namespace torch_blocked
