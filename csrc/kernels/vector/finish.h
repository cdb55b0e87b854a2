// Applies the epilogue of a convolution to one vector, between sum and store.
#pragma once

#include <array>
#include <type_traits>

#include "kernels/vector/epilogue.h"
#include "kernels/vector/functions.h"
#include "kernels/vector/short_lanes.h"
#include "kernels/vector/unrolled.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

// Calls f(function of a vector) with the activation's function, which is then inlined in the loops
// of f.
template <typename F>
inline void with_function(const Activation& a, F&& f) {
  const Vec alpha(a.alpha), beta(a.beta), zero(0.f);
  switch (a.kind) {
    case Activation::Kind::kNone:
      return;
    case Activation::Kind::kClamp:
      return f([=](const Vec& x) { return at::vec::clamp(x, alpha, beta); });
    case Activation::Kind::kLeakyRelu:
      return f([=](const Vec& x) {
        return at::vec::fmadd(at::vec::clamp_max(x, zero), alpha, at::vec::clamp_min(x, zero));
      });
    case Activation::Kind::kHardswish:
      return f([](const Vec& x) { return hardswish(x); });
    case Activation::Kind::kSilu:
      return f([](const Vec& x) { return silu(x); });
    case Activation::Kind::kGelu:
      return f([](const Vec& x) { return gelu(x); });
    case Activation::Kind::kGeluTanh:
      return f([](const Vec& x) { return gelu_tanh(x); });
    case Activation::Kind::kTanh:
      return f([](const Vec& x) { return tanh(x); });
    case Activation::Kind::kMish:
      return f([](const Vec& x) { return mish(x); });
  }
}

// Never inlined: their 20 instructions should not lie in the loops of other activations.
[[gnu::noinline]] inline Vec silu_alone(const Vec& x) { return silu(x); }
[[gnu::noinline]] inline Vec gelu_alone(const Vec& x) { return gelu(x); }
[[gnu::noinline]] inline Vec gelu_tanh_alone(const Vec& x) { return gelu_tanh(x); }
[[gnu::noinline]] inline Vec tanh_alone(const Vec& x) { return tanh(x); }
[[gnu::noinline]] inline Vec mish_alone(const Vec& x) { return mish(x); }

inline Vec activate(const Activation& a, const Vec& x) {
  const Vec zero(0.f);
  switch (a.kind) {
    case Activation::Kind::kNone:
      return x;
    case Activation::Kind::kClamp:
      return at::vec::clamp(x, Vec(a.alpha), Vec(a.beta));
    case Activation::Kind::kLeakyRelu:
      return at::vec::fmadd(at::vec::clamp_max(x, zero), Vec(a.alpha), at::vec::clamp_min(x, zero));
    case Activation::Kind::kHardswish:
      return hardswish(x);
    case Activation::Kind::kSilu:
      return silu_alone(x);
    case Activation::Kind::kGelu:
      return gelu_alone(x);
    case Activation::Kind::kGeluTanh:
      return gelu_tanh_alone(x);
    case Activation::Kind::kTanh:
      return tanh_alone(x);
    case Activation::Kind::kMish:
      return mish_alone(x);
  }
  __builtin_unreachable();
}

// e^x with a relative error of 7.5e-5 and half the instructions, for values that are rounded to
// bfloat16 (3.9e-3). It is 2^n times the polynomial of degree 3 with the least relative error for
// |r| <= 1/2.
inline Vec rough_exponential(const Vec& x) {
  const Vec power = at::vec::clamp(x * Vec(kLog2E), Vec(-126.f), Vec(128.f));
  const Vec n = power.round(), r = power - n;
  Vec p(5.517167e-2f);
  for (const float term : {2.4261114e-1f, 6.9326099e-1f, 9.9992807e-1f}) {
    p = at::vec::fmadd(p, r, Vec(term));
  }
  return scale_by_power(p, n);
}

// x / (1 + e^power) with a relative error of 1.4e-4.
[[gnu::noinline]] inline Vec rough_gated(const Vec& x, const Vec& power) {
  const Vec y = Vec(1.f) + rough_exponential(power);
#if defined(CPU_CAPABILITY_AVX512)
  return x * Vec(_mm512_rcp14_ps(y));
#else
  return x / y;
#endif
}

// The activation of a value that is stored as a Number.
template <typename Number>
inline Vec activate_as(const Activation& a, const Vec& x) {
  if constexpr (std::is_same_v<Number, std::uint16_t>) {  // bfloat16
    if (a.kind == Activation::Kind::kSilu) return rough_gated(x, x.neg());
    if (a.kind == Activation::Kind::kGeluTanh) {
      return rough_gated(x, x * at::vec::fmadd(x * x, Vec(-0.071354816f), Vec(-1.5957691f)));
    }
  }
  return activate(a, x);
}

// The rest of an epilogue after its first activation: the residual, and the activation of the sum.
// residual and dst have one format, so the distance from a value of dst to its residual is always
// the same.
class Rest {
 public:
  Rest(const Epilogue& epilogue, const void* residual, const void* dst)
      : after_(epilogue.after),
        has_residual_(epilogue.residual),
        distance_(epilogue.residual ? reinterpret_cast<std::intptr_t>(residual) -
                                          reinterpret_cast<std::intptr_t>(dst)
                                    : 0) {}

  // Finishes `value`, which goes to `count` lanes at dst, of float32 or bfloat16.
  template <typename Number>
  TORCH_BLOCKED_INLINE Vec operator()(const Vec& value, const Number* dst,
                                      std::int64_t count) const {
    if (!has_residual_) return value;
    const auto* residual =
        reinterpret_cast<const Number*>(reinterpret_cast<std::intptr_t>(dst) + distance_);
    return activate_as<Number>(after_, value + load(residual, count));
  }

 private:
  Activation after_;
  bool has_residual_;
  std::intptr_t distance_;
};

// Calls f(finish), where finish is the epilogue as a function of a sum, its dst and its lanes. The
// first activation is inlined in the loops of f. On a Zen 3 SiLU and GELU take 6 and 7 cycles a
// vector in a loop of their own, and 12 if each vector calls them.
template <typename Number = float, typename F>
inline void with_finish(const Epilogue& epilogue, const void* residual, const void* dst, F&& f) {
  const Rest rest(epilogue, residual, dst);
  // By value: with references, GCC assumes that stores change them, and loops read them again.
  const auto finish_by = [rest, &f](const auto& before) {
    f([rest, before](const Vec& sum, const Number* to, std::int64_t count = kWidth)
          TORCH_BLOCKED_INLINE { return rest(before(sum), to, count); });
  };
  if (epilogue.before.kind == Activation::Kind::kNone) {
    finish_by([](const Vec& x) { return x; });
  } else if constexpr (std::is_same_v<Number, std::uint16_t>) {
    finish_by([&](const Vec& x) { return activate_as<Number>(epilogue.before, x); });
  } else {
    with_function(epilogue.before, finish_by);
  }
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
