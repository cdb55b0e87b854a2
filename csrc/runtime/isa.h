// The instruction set in use, for our kernels and for oneDNN alike.
#pragma once

#include <cstdint>
#include <vector>

namespace torch_blocked {

enum class Isa { kDefault, kAvx2, kAvx512 };

// The best set the CPU has, limited by TORCH_BLOCKED_MAX_ISA (default, avx2, avx512) and by
// oneDNN's own limit (ONEDNN_MAX_CPU_ISA): both sides always run the same one. Fixed at first call.
Isa isa();

const char* isa_name(Isa isa);

// Channel blocks with fast kernels on this ISA, best first: (16, 8) on AVX-512, else (8).
// oneDNN runs 16c as `ref` below AVX-512, and 8c with AVX2 kernels on AVX-512.
std::vector<std::int64_t> native_blocks();

}  // namespace torch_blocked
