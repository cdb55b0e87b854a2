// A pointwise computation as a list of instructions. Each instruction runs over a strip of its
// operands while the strip is in L1. This has three times the speed of passes over memory.
#pragma once

#include <cstdint>

namespace torch_blocked::kernels {

enum class Arithmetic : std::int64_t {
#define UNARY(name, value) name,
#define BINARY(name, value) name,
#define TERNARY(name, value) name,
#include "kernels/rows/arithmetic.inc"
};

// How many of x, y and z an operation reads.
constexpr std::int64_t arity(Arithmetic op) {
  switch (op) {
#define UNARY(name, value) \
  case Arithmetic::name:   \
    return 1;
#define BINARY(name, value) \
  case Arithmetic::name:    \
    return 2;
#define TERNARY(name, value) \
  case Arithmetic::name:     \
    return 3;
#include "kernels/rows/arithmetic.inc"
  }
  __builtin_unreachable();
}

// place[dst] = f(x_scale place[x] + x_shift, y_scale place[y] + y_shift, place[z]), where f is
// `op`. A shift of -0 changes no value, not even the sign of a zero.
struct Instruction {
  Arithmetic op;
  std::int64_t dst, x, y = 0, z = 0;
  double x_scale = 1, x_shift = -0., y_scale = 1, y_shift = -0.;
  double alpha = 0, beta = 0;
};

// Places are numbered: kMostOperands operands first, then kMostStrips strips, then one place that
// is 0 everywhere. The last instruction always writes to memory, whatever the number of its dst.
struct Program {
  static constexpr std::int64_t kMostOperands = 12, kMostStrips = 12;
  static constexpr std::int64_t kZeros = kMostOperands + kMostStrips;

  const Instruction* instructions;
  std::int64_t count, operands;
};

// Memory that a row of pixels reads.
struct ProgramOperand {
  enum class Kind : std::int64_t {
    kFull,    // [pixels, lanes]
    kLanes,   // [lanes], of every pixel
    kPixels,  // one value per pixel, for all lanes; `stride` floats from one to the next
  };
  Kind kind;
  const float* data;
  std::int64_t stride;
};

// Pixels of one row: `dst` is [pixels, lanes].
struct ProgramRow {
  static constexpr std::int64_t kMostLanes = 1024;

  const ProgramOperand* operands;
  float* dst;
  std::int64_t pixels, lanes;  // lanes: at most kMostLanes
};

}  // namespace torch_blocked::kernels
