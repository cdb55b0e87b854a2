// Runs a pointwise program: each instruction goes over a strip of its operands.
#include "kernels/rows/program.h"

#include <algorithm>

#include "kernels/rows/arithmetic.h"
#include "kernels/vector/functions.h"

namespace torch_blocked::kernels {

template <>
struct Fast<CPU_CAPABILITY::Vec> {
  using Vec = CPU_CAPABILITY::Vec;
  static Vec times_sigmoid(const Vec& x, const Vec& y) {
    return CPU_CAPABILITY::times_sigmoid(x, y);
  }
  static Vec tanh(const Vec& x) { return CPU_CAPABILITY::tanh(x); }
  static Vec exp(const Vec& x) { return CPU_CAPABILITY::exponential(x); }
  static Vec expm1(const Vec& x) { return CPU_CAPABILITY::exponential_less_one(x); }
  static Vec erf(const Vec& x) { return CPU_CAPABILITY::erf(x); }
  static Vec softplus(const Vec& x) { return CPU_CAPABILITY::softplus(x); }
  static Vec mish(const Vec& x) { return CPU_CAPABILITY::mish(x); }
};

namespace CPU_CAPABILITY {
namespace {

// The floats of a strip. 12 strips are 48 KB, and most programs need three.
constexpr std::int64_t kStrip = ProgramRow::kMostLanes;
// The distance between strips. It puts them in different sets of L1; 4 KB apart they would share
// sets.
constexpr std::int64_t kApart = kStrip + 16;

// Where a strip of an operand lies. `mask` is 0 if all pixels read the same vector, else all bits.
struct Place {
  const float* data;
  std::int64_t mask = -1;

  Vec vector(std::int64_t i, std::int64_t lanes) const { return load(data + (i & mask), lanes); }
};

// Runs one instruction on `count` floats of each place.
struct Strip {
  const Instruction& instruction;
  Place x, y, z;
  float* dst;
  std::int64_t count;

  template <Arithmetic op>
  void run() const {
    const Vec x_scale(static_cast<float>(instruction.x_scale));
    const Vec x_shift(static_cast<float>(instruction.x_shift));
    const Vec y_scale(static_cast<float>(instruction.y_scale));
    const Vec y_shift(static_cast<float>(instruction.y_shift));
    const Vec alpha(static_cast<float>(instruction.alpha));
    const Vec beta(static_cast<float>(instruction.beta));
    constexpr std::int64_t reads = arity(op);
    // Copies of members, because GCC assumes that a store may change members.
    const auto one = [=, x = x, y = y, z = z, dst = dst](std::int64_t i, std::int64_t lanes) {
      const Vec a = at::vec::fmadd(x.vector(i, lanes), x_scale, x_shift);
      const Vec b = reads > 1 ? at::vec::fmadd(y.vector(i, lanes), y_scale, y_shift) : a;
      const Vec c = reads > 2 ? z.vector(i, lanes) : a;
      store(compute(op, a, b, c, alpha, beta), dst + i, lanes);
    };
    const std::int64_t end = count;
    std::int64_t i = 0;
    for (; i + kWidth <= end; i += kWidth) one(i, kWidth);
    if (i < end) one(i, end - i);
  }

  void run() const {
    switch (instruction.op) {
#define UNARY(name, value) \
  case Arithmetic::name:   \
    return run<Arithmetic::name>();
#define BINARY UNARY
#define TERNARY UNARY
#include "kernels/rows/arithmetic.inc"
    }
  }
};

// Doubles the copied part each time, because a copy of 8 lanes takes as long as one of 64.
void repeat_lanes(const float* src, std::int64_t lanes, float* dst, std::int64_t count) {
  std::copy_n(src, lanes, dst);
  for (std::int64_t done = lanes; done < count; done *= 2) {
    std::copy_n(dst, std::min(done, count - done), dst + done);
  }
}

void spread_pixels_of(const ProgramOperand& operand, std::int64_t pixel, std::int64_t lanes,
                      float* dst, std::int64_t count) {
  const float* src = operand.data + pixel * operand.stride;
  for (std::int64_t i = 0; i < count; i += lanes, src += operand.stride) {
    std::fill_n(dst + i, lanes, *src);
  }
}

}  // namespace

void run_program(const Program& program, const ProgramRow& row) {
  constexpr std::int64_t kOperands = Program::kMostOperands;
  using Kind = ProgramOperand::Kind;
  alignas(64) float filled[kOperands][kApart];  // of operands that memory does not have so
  alignas(64) float strips[Program::kMostStrips][kApart];
  alignas(64) static constexpr float kZeros[kStrip] = {};
  Place places[Program::kZeros + 1];
  places[Program::kZeros] = {kZeros};
  const std::int64_t step = kStrip / row.lanes;  // pixels of a strip
  for (std::int64_t i = 0; i < Program::kMostStrips; ++i) places[kOperands + i] = {strips[i]};
  for (std::int64_t i = 0; i < program.operands; ++i) {
    if (row.operands[i].kind != Kind::kFull) places[i] = {filled[i]};
    if (row.operands[i].kind != Kind::kLanes) continue;
    if (row.lanes == kWidth) {
      places[i] = {row.operands[i].data, 0};
      continue;
    }
    repeat_lanes(row.operands[i].data, row.lanes, filled[i],
                 std::min(step, row.pixels) * row.lanes);
  }
  for (std::int64_t pixel = 0; pixel < row.pixels; pixel += step) {
    const std::int64_t count = std::min(step, row.pixels - pixel) * row.lanes;
    for (std::int64_t i = 0; i < program.operands; ++i) {
      const ProgramOperand& operand = row.operands[i];
      if (operand.kind == Kind::kFull) places[i] = {operand.data + pixel * row.lanes};
      if (operand.kind == Kind::kPixels) {
        spread_pixels_of(operand, pixel, row.lanes, filled[i], count);
      }
    }
    for (std::int64_t k = 0; k < program.count; ++k) {
      const Instruction& instruction = program.instructions[k];
      float* dst = k + 1 == program.count ? row.dst + pixel * row.lanes
                                          : strips[instruction.dst - kOperands];
      Strip{instruction, places[instruction.x], places[instruction.y], places[instruction.z], dst,
            count}
          .run();
    }
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace torch_blocked::kernels
