// Finds the instruction set to use: what the CPU has, within the limits of the environment and of
// oneDNN.
#include "runtime/isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <oneapi/dnnl/dnnl.hpp>
#include <string_view>

#include "format/errors.h"

namespace torch_blocked {
namespace {

struct IsaRow {
  Isa isa;
  const char* name;
  dnnl::cpu_isa onednn;  // the least oneDNN ISA that runs this set
  dnnl::cpu_isa limit;   // the best oneDNN ISA that has nothing beyond this set
};

constexpr std::array<IsaRow, 4> kIsas{{
    {Isa::kDefault, "default", dnnl::cpu_isa::sse41, dnnl::cpu_isa::sse41},
    {Isa::kAvx2, "avx2", dnnl::cpu_isa::avx2, dnnl::cpu_isa::avx2},
    {Isa::kAvx512, "avx512", dnnl::cpu_isa::avx512_core, dnnl::cpu_isa::avx512_core_fp16},
    {Isa::kAmx, "amx", dnnl::cpu_isa::avx512_core_amx, dnnl::cpu_isa::avx512_core_amx_fp16},
}};

// Linux gives the 8 KiB of tiles only to processes that ask for permission.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// GCC 12 does not know amx_bf16 and amx_tile by name. They are two bits of EDX in leaf 7.
bool has_tiles() {
  constexpr unsigned kTiles = 1u << 22 | 1u << 24;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kTiles) == kTiles &&
         __builtin_cpu_supports("avx512bf16");
}

Isa of_cpu() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return has_tiles() ? Isa::kAmx : Isa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::kAvx2;
  return Isa::kDefault;
}

// oneDNN's ISAs are sets of bits: a covers b if it has all of b's.
bool covers(dnnl::cpu_isa a, dnnl::cpu_isa b) {
  const auto bits_a = static_cast<unsigned>(a), bits_b = static_cast<unsigned>(b);
  return (bits_a & bits_b) == bits_b;
}

// Whether an ISA is within oneDNN's limit.
bool allowed(dnnl::cpu_isa isa) { return covers(dnnl::get_effective_cpu_isa(), isa); }

Isa choose() {
  Isa chosen = of_cpu();
  if (const char* limit = std::getenv("TORCH_BLOCKED_MAX_ISA")) {
    const IsaRow* row = nullptr;
    for (const IsaRow& candidate : kIsas) {
      if (std::string_view(limit) == candidate.name) row = &candidate;
    }
    if (!row) {
      fail_value("TORCH_BLOCKED_MAX_ISA", "default, avx2, avx512 or amx", limit,
                 "correct or unset the variable");
    }
    if (row->isa < chosen) {
      chosen = row->isa;
      // The limit is only lowered: ONEDNN_MAX_CPU_ISA may already ask for less.
      if (covers(dnnl::get_effective_cpu_isa(), row->limit)) dnnl::set_max_cpu_isa(row->limit);
    }
  }
  while (chosen > Isa::kDefault &&
         !covers(dnnl::get_effective_cpu_isa(), kIsas[static_cast<int>(chosen)].onednn)) {
    chosen = static_cast<Isa>(static_cast<int>(chosen) - 1);
  }
  return chosen == Isa::kAmx && !may_use_tiles() ? Isa::kAvx512 : chosen;
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

const char* isa_name(Isa isa) { return kIsas[static_cast<int>(isa)].name; }

std::vector<std::int64_t> native_blocks() {
  return isa() >= Isa::kAvx512 ? std::vector<std::int64_t>{16, 8} : std::vector<std::int64_t>{8};
}

bool multiplies_bfloats() {
  return isa() < Isa::kAvx512 ||
         (__builtin_cpu_supports("avx512bf16") && allowed(dnnl::cpu_isa::avx512_core_bf16));
}

bool gains_by_bfloats() { return isa() >= Isa::kAvx512 && multiplies_bfloats(); }

bool multiplies_bytes() {
  switch (isa()) {
    case Isa::kAvx512:
    case Isa::kAmx:
      return __builtin_cpu_supports("avx512vnni") && allowed(dnnl::cpu_isa::avx512_core_vnni);
    case Isa::kAvx2:
      return __builtin_cpu_supports("avxvnni") && allowed(dnnl::cpu_isa::avx2_vnni);
    case Isa::kDefault:
      return true;
  }
  __builtin_unreachable();
}

bool permutes_bytes() {
  return multiplies_bytes() && (isa() < Isa::kAvx512 || __builtin_cpu_supports("avx512vbmi"));
}

}  // namespace torch_blocked
