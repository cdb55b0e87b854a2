// The epilogue: what happens to a sum before it is stored. Kernels apply it through
// kernels/vector/finish.h.
#pragma once

#include <cstdint>

namespace torch_blocked::kernels {

// A function of one value. All of them have f(0) = 0, so the zero tail stays zero.
struct Activation {
  enum class Kind : std::int64_t {
    kNone,
    kClamp,
    kLeakyRelu,
    kHardswish,
    kSilu,
    kGelu,
    kGeluTanh,
    kTanh,
    kMish
  };
  Kind kind = Kind::kNone;
  float alpha = 0, beta = 0;  // kClamp: least and greatest; kLeakyRelu: the slope below 0
};

// A sum is stored as after(before(sum) + residual), where the residual has the format of dst.
struct Epilogue {
  Activation before, after;
  bool residual = false;  // false: `after` is kNone

  bool empty() const { return before.kind == Activation::Kind::kNone && !residual; }
};

}  // namespace torch_blocked::kernels
