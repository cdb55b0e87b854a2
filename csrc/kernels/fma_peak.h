// Measures the peak of the CPU, against which benchmarks compare.
#pragma once

namespace torch_blocked {

// Float32 GFLOP/s of one core now: the fastest of several runs of independent FMAs in registers.
double fma_peak_gflops();

}  // namespace torch_blocked
