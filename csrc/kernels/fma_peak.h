// What the CPU could do at most: the yardstick of benchmarks.
#pragma once

namespace torch_blocked {

// Float32 GFLOP/s of one core now: the fastest of several runs of independent FMAs in registers.
double fma_peak_gflops();

}  // namespace torch_blocked
