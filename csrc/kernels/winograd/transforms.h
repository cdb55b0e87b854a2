// The one-dimensional transforms of Winograd's F(2, 3), F(4, 3) and F(3, 4), and of kernels at
// stride 2. The tiles of a convolution nest them: one transform along height and width, one along
// depth.
//
// F(4, 3) interpolates at 0, +-1/sqrt(2), +-sqrt(2) and infinity: 2-3 times closer to the exact
// result than with the textbook's 0, +-1, +-2. Source: Lavin and Gray, "Fast Algorithms for
// Convolutional Neural Networks", 2015.
//
// Transforms nest: 3x3x3 kernels use F(4, 3) along height and width and F(2, 3) along depth. 2x4x4
// outputs then cost 144 products a channel pair instead of 864, and the errors stay those of 2-D.
//
// At stride 2 a convolution is the sum of four at stride 1: the even and odd rows and columns of
// src meet the even and odd taps. Each of the four has its own tiles of the same outputs. They are
// added up before the transform of dst. For 3 taps this is F(4, 2) at +-3/8, +-5/4 and infinity,
// plus four products with one weight for the middle tap. 4x4 outputs take 81 products with 36
// weights instead of 144, and 2x2 outputs 25 with 16 weights instead of 36. Kernels of 4, 5 and 6
// taps have tiles of 10, 11 and 12 positions along a dim. Larger kernels are split into several.
// Along depth a tile is one output, so a 3x3x3 kernel is three kernels of 3x3 there. The errors are
// those of direct sums.
//
// On one core of a Zen 3, from 64 channels on, a 3x3 at stride 2 takes 0.66 to 0.85 of the time of
// the best direct kernel, a 4x4 0.63 and a 5x5 0.41 to 0.46. HRNet, which downsamples often, takes
// 0.7 to 0.8.
#pragma once

#include <utility>

#include "kernels/vector/lanes.h"
#include "kernels/vector/unrolled.h"

namespace torch_blocked::kernels::CPU_CAPABILITY::winograd {

inline constexpr float kSqrt2 = 1.41421356237309505f, kHalfSqrt2 = 0.70710678118654752f;

inline Vec fma(float a, const Vec& b, const Vec& c) { return at::vec::fmadd(Vec(a), b, c); }

// The sizes of a transform of m outputs: kTile positions (one for each src pixel), kWeights rows of
// G, and weights_of(position), the row of G that a position multiplies.
template <int m, int taps>
struct Interpolated {
  static constexpr int kStride = 1, kM = m, kTaps = taps, kTile = m + taps - 1, kWeights = kTile;
  static constexpr int weights_of(int position) { return position; }
};

// Each transform takes one column r with elements r(i). src<row>(r) is row `row` of B^T r, and so
// on.
struct F4 : Interpolated<4, 3> {
  // B^T
  template <int row, typename R>
  static Vec src(R&& r) {
    if constexpr (row == 0) return fma(-2.5f, r(2), r(0) + r(4));
    if constexpr (row == 5) return fma(-2.5f, r(3), r(1) + r(5));
    const Vec outer_even = fma(-2.f, r(2), r(4));
    const Vec outer_odd = fma(kSqrt2, r(1), Vec(-kHalfSqrt2) * r(3));
    if constexpr (row == 1) return outer_even - outer_odd;
    if constexpr (row == 2) return outer_even + outer_odd;
    const Vec inner_even = fma(-0.5f, r(2), r(4));
    const Vec inner_odd = fma(kHalfSqrt2, r(1), Vec(-kSqrt2) * r(3));
    if constexpr (row == 3) return inner_even - inner_odd;
    return inner_even + inner_odd;
  }

  // A^T
  template <int row, typename R>
  static Vec dst(R&& r) {
    const Vec sum1 = r(1) + r(2), sum2 = r(3) + r(4);
    if constexpr (row == 0) return r(0) + sum1 + sum2;
    if constexpr (row == 2) return fma(0.5f, sum1, sum2 + sum2);
    const Vec difference1 = r(1) - r(2), difference2 = r(3) - r(4);
    if constexpr (row == 1) return fma(kHalfSqrt2, difference1, Vec(kSqrt2) * difference2);
    return fma(kHalfSqrt2 / 2, difference1, fma(2 * kSqrt2, difference2, r(5)));
  }

  // G
  template <int row, typename R>
  static Vec weights(R&& r) {
    if constexpr (row == 0) return r(0);
    if constexpr (row == 5) return r(2);
    constexpr float third = 1.f / 3;
    constexpr float sign = row % 2 == 1 ? 1.f : -1.f;
    if constexpr (row < 3) {
      return Vec(-third) * (r(0) + r(0) + r(2) + Vec(sign * kSqrt2) * r(1));
    }
    return Vec(third) * (fma(0.5f, r(0), r(2)) + Vec(sign * kHalfSqrt2) * r(1));
  }

  // A
  template <int row, typename R>
  static Vec diff_dst(R&& r) {
    if constexpr (row == 0) return r(0);
    if constexpr (row == 5) return r(3);
    constexpr float factor = row < 3 ? 0.5f : 2.f;
    const Vec even = fma(factor, r(2), r(0)), odd = fma(factor, r(3), r(1));
    constexpr float sign = row % 2 == 1 ? 1.f : -1.f;
    return fma(sign * (row < 3 ? kHalfSqrt2 : kSqrt2), odd, even);
  }

  // G^T
  template <int row, typename R>
  static Vec diff_weights(R&& r) {
    constexpr float third = 1.f / 3;
    if constexpr (row == 1) {
      return fma(third * kSqrt2, r(2) - r(1), Vec(third * kHalfSqrt2) * (r(3) - r(4)));
    }
    const Vec inner = r(1) + r(2), outer = r(3) + r(4);
    if constexpr (row == 0) return fma(-2 * third, inner, fma(0.5f * third, outer, r(0)));
    return fma(third, outer - inner, r(5));
  }
};

// F(3, 4): kernels of 4 taps at the points of F(4, 3), so the transform of src is the same.
struct F3 : Interpolated<3, 4> {
  template <int row, typename R>
  static Vec src(R&& r) {
    return F4::src<row>(r);
  }

  template <int row, typename R>
  static Vec dst(R&& r) {
    if constexpr (row == 1) return fma(kHalfSqrt2, r(1) - r(2), Vec(kSqrt2) * (r(3) - r(4)));
    const Vec sum1 = r(1) + r(2), sum2 = r(3) + r(4);
    if constexpr (row == 0) return r(0) + sum1 + sum2;
    return fma(0.5f, sum1, fma(2.f, sum2, r(5)));
  }

  // c (r0 + p r1 + p^2 r2 + p^3 r3) at the points p
  template <int row, typename R>
  static Vec weights(R&& r) {
    if constexpr (row == 0) return r(0);
    if constexpr (row == 5) return r(3);
    constexpr float sign = row % 2 == 1 ? 1.f : -1.f, c = row < 3 ? -2.f / 3 : 1.f / 6,
                    square = row < 3 ? 0.5f : 2.f, p = sign * (row < 3 ? kHalfSqrt2 : kSqrt2);
    return Vec(c) * fma(p, fma(square, r(3), r(1)), fma(square, r(2), r(0)));
  }
};

// F(4, 3) with rows of B^T and G of similar size, for words of few bits. B^T is F4's, whose values
// are at most 1 / kShare times the largest of src. Rows of G have length 1. A^T undoes both
// scalings.
struct FixedF4 : F4 {
  // 1 / the sum of the absolute values of a row of B^T.
  static constexpr float kShare[] = {1 / 4.5f,        1 / 5.12132034f, 1 / 5.12132034f,
                                     1 / 3.62132034f, 1 / 3.62132034f, 1 / 4.5f};
  // The factors by which A^T multiplies rows 0 and 5, 1 and 2, 3 and 4: these sums times the
  // lengths of G's rows, 1, sqrt(7) / 3 and sqrt(7) / 6.
  static constexpr float kEnds = 4.5f, kOuter = 4.51659113f, kInner = 1.59686912f;

  template <int row, typename R>
  static Vec dst(R&& r) {
    if constexpr (row % 2 == 0) {
      const Vec sum1 = r(1) + r(2), sum2 = r(3) + r(4);
      if constexpr (row == 2) return fma(0.5f * kOuter, sum1, Vec(2 * kInner) * sum2);
      return fma(kEnds, r(0), fma(kOuter, sum1, Vec(kInner) * sum2));
    } else {
      const Vec difference1 = r(1) - r(2), difference2 = r(3) - r(4);
      if constexpr (row == 1) {
        return fma(kHalfSqrt2 * kOuter, difference1, Vec(kSqrt2 * kInner) * difference2);
      }
      return fma(kHalfSqrt2 / 2 * kOuter, difference1,
                 fma(2 * kSqrt2 * kInner, difference2, Vec(kEnds) * r(5)));
    }
  }

  template <int row, typename R>
  static Vec weights(R&& r) {
    if constexpr (row == 0) return r(0);
    if constexpr (row == 5) return r(2);
    constexpr float sign = row % 2 == 1 ? 1.f : -1.f, seventh = 0.37796447f;  // 1 / sqrt(7)
    if constexpr (row < 3) return Vec(-seventh) * fma(sign * kSqrt2, r(1), r(0) + r(0) + r(2));
    return Vec(seventh) * fma(sign * kSqrt2, r(1), r(0) + r(2) + r(2));
  }
};

// F(4, 3) of integers, at 0, +-1, +-2 and infinity. Each row of G is multiplied by the least number
// that makes it whole. A^T is multiplied by 24 and undoes the factors of G. Everything except the
// division by 24 for each dim is exact. src is words, all else float32.
struct WholeF4 : Interpolated<4, 3> {
  // B^T: [4 0 -5 0 1 0], [0 -4 -4 1 1 0], [0 4 -4 -1 1 0], [0 -2 -1 2 1 0], [0 2 -1 -2 1 0],
  // [0 4 0 -5 0 1]
  template <int row, typename R>
  TORCH_BLOCKED_INLINE static auto src(R&& r) {
    if constexpr (row == 0) {
      return ((r(0) - r(2)) << 2) + (r(4) - r(2));
    } else if constexpr (row == 5) {
      return ((r(1) - r(3)) << 2) + (r(5) - r(3));
    } else if constexpr (row < 3) {
      const auto even = r(4) - (r(2) << 2), odd = r(3) - (r(1) << 2);
      if constexpr (row == 1) return even + odd;
      return even - odd;
    } else {
      const auto even = r(4) - r(2), odd = (r(3) - r(1)) << 1;
      if constexpr (row == 3) return even + odd;
      return even - odd;
    }
  }

  // 24 A^T
  template <int row, typename R>
  static Vec dst(R&& r) {
    if constexpr (row % 2 == 0) {
      const Vec sum1 = r(1) + r(2), sum2 = r(3) + r(4);
      if constexpr (row == 0) return fma(6.f, r(0), fma(-4.f, sum1, sum2));
      return Vec(4.f) * (sum2 - sum1);
    } else {
      const Vec difference1 = r(1) - r(2), difference2 = r(3) - r(4);
      if constexpr (row == 1) return fma(-4.f, difference1, difference2 + difference2);
      return fma(-4.f, difference1, fma(8.f, difference2, Vec(24.f) * r(5)));
    }
  }

  // G: [1 0 0], [1 1 1], [1 -1 1], [1 2 4], [1 -2 4], [0 0 1]
  template <int row, typename R>
  static Vec weights(R&& r) {
    if constexpr (row == 0) return r(0);
    if constexpr (row == 5) return r(2);
    constexpr float point = (row < 3 ? 1.f : 2.f) * (row % 2 == 1 ? 1.f : -1.f);
    return fma(point, fma(point, r(2), r(1)), r(0));
  }
};

struct F2 : Interpolated<2, 3> {
  template <int row, typename R>
  static Vec src(R&& r) {
    if constexpr (row == 0) return r(0) - r(2);
    if constexpr (row == 1) return r(1) + r(2);
    if constexpr (row == 2) return r(2) - r(1);
    return r(3) - r(1);
  }

  template <int row, typename R>
  static Vec dst(R&& r) {
    if constexpr (row == 0) return r(0) + (r(1) + r(2));
    return (r(1) - r(2)) + r(3);
  }

  template <int row, typename R>
  static Vec weights(R&& r) {
    if constexpr (row == 0) return r(0);
    if constexpr (row == 1) return Vec(0.5f) * (r(0) + r(2) + r(1));
    if constexpr (row == 2) return Vec(0.5f) * (r(0) + r(2) - r(1));
    return r(2);
  }
};

// No transform: outputs of a kernel of one tap.
template <int m>
struct OneTap {
  static constexpr int kStride = 1, kM = m, kTaps = 1, kTile = m, kWeights = 1;
  static constexpr int weights_of(int) { return 0; }

  template <int row, typename R>
  static auto src(R&& r) {
    return r(row);
  }

  template <int row, typename R>
  static Vec dst(R&& r) {
    return r(row);
  }

  template <int row, typename R>
  static Vec weights(R&& r) {
    return r(0);
  }
};

using F1 = OneTap<1>;

// F(4, 2) at +-3/8, +-5/4 and infinity, which are exact in float32. At stride 2 the error of 3x3
// kernels is 0.8 to 1.0 times that of direct sums; at 0, +-1, 2 and infinity it would be 1.6 times.
struct F4Of2 : Interpolated<4, 2> {
  static constexpr float kNear = 0.375f, kFar = 1.25f, kNear2 = kNear * kNear, kFar2 = kFar * kFar;

  // The point of a row, and the square of the other.
  static constexpr float point(int row) {
    return (row % 2 ? -1.f : 1.f) * (row < 2 ? kNear : kFar);
  }
  static constexpr float other2(int row) { return row < 2 ? kFar2 : kNear2; }

  template <int row, typename R>
  static Vec src(R&& r) {
    if constexpr (row == 4) return fma(kNear2 * kFar2, r(0), fma(-kNear2 - kFar2, r(2), r(4)));
    return fma(point(row), fma(-other2(row), r(0), r(2)), fma(-other2(row), r(1), r(3)));
  }

  template <int row, typename R>
  static Vec dst(R&& r) {
    if constexpr (row % 2 == 0) {
      const Vec near = r(0) + r(1), far = r(2) + r(3);
      return row == 0 ? near + far : fma(kNear2, near, Vec(kFar2) * far);
    } else {
      const Vec near = r(0) - r(1), far = r(2) - r(3);
      if constexpr (row == 1) return fma(kNear, near, Vec(kFar) * far);
      return fma(kNear * kNear2, near, fma(kFar * kFar2, far, r(4)));
    }
  }

  template <int row, typename R>
  static Vec weights(R&& r) {
    if constexpr (row == 4) return r(1);
    constexpr float square = point(row) * point(row);
    return Vec(1 / (2 * point(row) * (square - other2(row)))) * fma(point(row), r(1), r(0));
  }
};

// F(2, 2) at 0, 1 and infinity.
struct F2Of2 : Interpolated<2, 2> {
  template <int row, typename R>
  static Vec src(R&& r) {
    if constexpr (row == 1) return r(1);
    return r(row) - r(1);
  }

  template <int row, typename R>
  static Vec dst(R&& r) {
    return r(row) + r(row + 1);
  }

  template <int row, typename R>
  static Vec weights(R&& r) {
    if constexpr (row == 1) return r(0) + r(1);
    return r(row / 2);
  }
};

// At stride 2 the even pixels of src meet only the even taps, and the odd ones the odd taps. So it
// is the sum of two convolutions at stride 1. 4 outputs of 3 taps take F(4, 2) plus four products
// with the single odd tap: 9 products instead of 12.
template <typename Even, typename Odd>
struct AtStride2 {
  static constexpr int kStride = 2, kM = Even::kM, kTaps = Even::kTaps + Odd::kTaps,
                       kTile = Even::kTile + Odd::kTile, kWeights = Even::kWeights + Odd::kWeights;
  static_assert(Odd::kM == kM && (Even::kTaps == Odd::kTaps || Even::kTaps == Odd::kTaps + 1));

  static constexpr int weights_of(int position) {
    return position < Even::kTile ? Even::weights_of(position)
                                  : Even::kWeights + Odd::weights_of(position - Even::kTile);
  }

  template <int row, typename R>
  static auto src(R&& r) {
    if constexpr (row < Even::kTile) {
      return Even::template src<row>([&](int i) { return r(2 * i); });
    } else {
      return Odd::template src<row - Even::kTile>([&](int i) { return r(2 * i + 1); });
    }
  }

  template <int row, typename R>
  static Vec dst(R&& r) {
    return Even::template dst<row>(r) +
           Odd::template dst<row>([&](int i) { return r(Even::kTile + i); });
  }

  template <int row, typename R>
  static Vec weights(R&& r) {
    if constexpr (row < Even::kWeights) {
      return Even::template weights<row>([&](int i) { return r(2 * i); });
    } else {
      return Odd::template weights<row - Even::kWeights>([&](int i) { return r(2 * i + 1); });
    }
  }
};

}  // namespace torch_blocked::kernels::CPU_CAPABILITY::winograd
