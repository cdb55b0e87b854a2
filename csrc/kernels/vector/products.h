// Policies of matrix products for float32, bfloat16 and words. With bfloat16 and words one 32-bit
// operation sums the products of kChannels inputs.
#pragma once

#include <limits>

#include "kernels/vector/short_lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

// Number: of src and dst. Stored: of weights in memory.
struct Floats {
  using Number = float;
  using Stored = float;
  using Weights = Vec;
  using Sum = Vec;
  static constexpr int kChannels = 1;
  static Weights weights(const Number* from) { return Vec::loadu(from); }
  static Weights repeat(const Number* from) { return Vec(*from); }
  static Vec add(const Vec& sum, const Weights& x, const Weights& w) {
    return at::vec::fmadd(x, w, sum);
  }
};

// float32 times signed bytes, which lie in a quarter of the memory.
struct FloatsByBytes : Floats {
  using Stored = std::int8_t;
  static Weights weights(const Stored* from) { return load_signed_bytes(from); }
};

struct Bfloats {
  using Number = std::uint16_t;
  using Stored = std::uint16_t;
  using Weights = Index;
  using Sum = Vec;
  static constexpr int kChannels = 2;
  static Weights weights(const Number* from) { return Index::loadu(from); }
  static Weights repeat(const Number* from) { return repeat_bits(from); }
  static Vec add(const Vec& sum, const Weights& x, const Weights& w) {
    return dot_bfloats(sum, x, w);
  }
};

// Sums are integers and must stay within 32 bits.
struct WordPairs {
  using Number = std::int16_t;
  using Weights = Index;
  using Sum = Index;
  static constexpr int kChannels = 2;
  static Weights weights(const Number* from) { return Index::loadu(from); }
  static Weights repeat(const Number* from) { return repeat_bits(from); }
  static Index add(const Index& sum, const Weights& x, const Weights& w) {
    return dot_words(sum, x, w);
  }
};

// The same for CPUs with VNNI.
struct VnniWordPairs : WordPairs {
  static Index add(const Index& sum, const Weights& x, const Weights& w) {
    return dot_words_vnni(sum, x, w);
  }
};

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
