// Multiplies float32 in tiles of bfloat16. amx.h explains how.
//
// Four of the eight tiles hold sums, each of 16 pixels by a vector of channels. Together they have
// two times 16 pixels by two vectors, or up to four times 16 pixels by one vector. The parts of src
// and weights are ordered so that each instruction needs at most one new tile. Its load takes half
// the time of a product.
#include "kernels/matrix/amx.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "kernels/vector/finish.h"
#include "kernels/vector/unrolled.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

constexpr std::int64_t kTileBytes = Amx::kLanes * Amx::kPixels * 2;
constexpr std::int64_t kTileFloats = Amx::kPixels * Amx::kWidth;
constexpr std::int64_t kPartBytes = Amx::kLanes * 2;
// Weights are prefetched two segments ahead of those that are split.
constexpr std::int64_t kAheadFloats = 2048;

// Splits float32 into parts.

TORCH_BLOCKED_INLINE inline __m512i upper_halves() {
  return _mm512_set1_epi32(static_cast<int>(0xffff0000u));
}

// Three numbers whose sum is x, each the upper 16 bits of a float32. The first is x without its
// other bits. The second is rounded, so that it is above the rest as often as below. An infinity or
// NaN is only in the last part, which meets only the first part of the weights.
struct Parts {
  __m512i values[Amx::kParts];
};

TORCH_BLOCKED_INLINE inline Parts parts_of(const __m512& x) {
  const __m512i upper = upper_halves();
  const __m512i half = _mm512_set1_epi32(0x8000);
  constexpr int kNanOrInfinite = 0x01 | 0x08 | 0x10 | 0x80;
  const __mmask16 finite = ~_mm512_fpclass_ps_mask(x, kNanOrInfinite);
  const __m512i first = _mm512_maskz_and_epi32(finite, _mm512_castps_si512(x), upper);
  const __m512 rest = _mm512_sub_ps(x, _mm512_castsi512_ps(first));
  const __m512i second =
      _mm512_maskz_and_epi32(finite, _mm512_add_epi32(_mm512_castps_si512(rest), half), upper);
  const __m512 last = _mm512_sub_ps(rest, _mm512_castsi512_ps(second));
  return {{first, second, _mm512_castps_si512(last)}};
}

// A part of 32 numbers, in which lane i of x and lane i of y are adjacent.
TORCH_BLOCKED_INLINE inline __m512i pair_up(const __m512i& x, const __m512i& y) {
  constexpr int kOrAnd = 0xf8;  // a | b & c
  return _mm512_ternarylogic_epi32(_mm512_srli_epi32(x, 16), y, upper_halves(), kOrAnd);
}

void store_parts(const Parts& x, const Parts& y, std::uint8_t* to, std::int64_t part_bytes) {
  unrolled<Amx::kParts>([&]<int i>() TORCH_BLOCKED_INLINE {
    _mm512_storeu_si512(to + i * part_bytes, pair_up(x.values[i], y.values[i]));
  });
}

// Tile instructions in inline assembly, because not every CPU for which the sources are compiled
// has them.

// The 64 bytes that ldtilecfg reads.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// Configures eight tiles of 64 bytes a row. Tiles of src and sums have as many rows as pixels;
// those of weights (6, 7) have all 16.
void configure(std::int64_t pixels) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = static_cast<std::uint8_t>(i < 6 ? pixels : Amx::kPixels);
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
}

void release() { asm volatile("tilerelease" ::: "memory"); }

template <int kTile>
TORCH_BLOCKED_INLINE inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

template <int kTile>
TORCH_BLOCKED_INLINE inline void load_tile(const void* from, std::int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(kTile) : "memory");
}

template <int kTile>
TORCH_BLOCKED_INLINE inline void store_tile(float* to) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(std::int64_t{64}), "i"(kTile)
               : "memory");
}

template <int kSum, int kSrc, int kWeights>
TORCH_BLOCKED_INLINE inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kSrc), "i"(kWeights));
}

// The parts of src and weights that are multiplied. In this order each product shares a part with
// the one before.
struct Product {
  int src, weights;
};
constexpr std::array<Product, 6> kProducts{{{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 0}, {0, 2}}};

// Splits the weights of a block, [segments, kLanes, vectors, kWidth], to parts [segments, parts,
// vectors, kLanes / 2, kWidth, 2]. It splits some rows at a time between the products of the block
// before, which use other parts of the core.
struct Splitting {
  const float* from = nullptr;  // of a segment
  std::uint8_t* to = nullptr;
  std::int64_t vectors = 0, next = 0, count = 0;  // pairs of lanes in all vectors
  std::int64_t row = 0;                           // of the segment

  void advance(std::int64_t rows) {
    const std::int64_t of_segment = Amx::kLanes / 2 * vectors;
    for (const std::int64_t end = std::min(next + rows, count); next < end; ++next) {
      const float* src = from + row * Amx::kWidth;
      // A segment is a page, and the hardware prefetcher stops at the end of a page.
      __builtin_prefetch(src + kAheadFloats);
      __builtin_prefetch(src + of_segment * Amx::kWidth + kAheadFloats);
      const std::int64_t vector = vectors == 2 ? row & 1 : 0;
      const std::int64_t lane = vectors == 2 ? row >> 1 : row;
      store_parts(parts_of(_mm512_loadu_ps(src)),
                  parts_of(_mm512_loadu_ps(src + of_segment * Amx::kWidth)),
                  to + vector * kTileBytes + lane * 64, vectors * kTileBytes);
      if (++row < of_segment) continue;
      row = 0;
      from += 2 * of_segment * Amx::kWidth;
      to += vectors * Amx::kWeightBytes;
    }
  }
};

// Sums are in tiles i * kVectors + j, src in 4 and 5, weights in 6 and 7.
template <int kTiles, int kVectors, int kProduct>
TORCH_BLOCKED_INLINE inline void multiply_parts(const std::array<const std::uint8_t*, kTiles>& src,
                                                std::int64_t step, const std::uint8_t* weights,
                                                Splitting& next, std::int64_t rows) {
  constexpr int kSrc = kProducts[kProduct].src, kWeights = kProducts[kProduct].weights;
  constexpr bool kFirst = kProduct == 0;
  constexpr Product kBefore = kProducts[kFirst ? 0 : kProduct - 1];
  constexpr bool kNewSrc = kFirst || kSrc != kBefore.src,
                 kNewWeights = kFirst || kWeights != kBefore.weights;
  if constexpr (kNewWeights) {
    unrolled<kVectors>([&]<int j>() TORCH_BLOCKED_INLINE {
      load_tile<6 + j>(weights + (kWeights * kVectors + j) * kTileBytes, 64);
    });
  }
  unrolled<kTiles>([&]<int i>() TORCH_BLOCKED_INLINE {
    if constexpr (kNewSrc || kTiles > 2) load_tile<4 + i % 2>(src[i] + kSrc * kPartBytes, step);
    unrolled<kVectors>([&]<int j>() TORCH_BLOCKED_INLINE {
      multiply_tiles<i * kVectors + j, 4 + i % 2, 6 + j>();
    });
  });
  next.advance(rows);
}

// Where the sums of a tile of pixels go.
struct Place {
  std::int64_t slot, dst, count;  // bytes, floats, pixels
};

constexpr int kMostTiles = 4;

// Finishes sums [tiles, vectors, kPixels, kWidth] and stores them to dst, a tile at a time while
// the next sums are multiplied, which uses other parts of the core.
struct Finishing {
  alignas(64) float sums[kMostTiles * kTileFloats];
  const float* from;  // `sums`, or the sums of several parts
  std::array<Place, kMostTiles> places;
  std::int64_t vectors, first;  // the first channel
  std::int64_t next = 0, count = 0;
};

// Stores value(sum, dst) to `count` pixels of `lanes` channels.
template <typename Value>
TORCH_BLOCKED_INLINE inline void store_values(const AmxTiles& t, std::int64_t count,
                                              std::int64_t lanes, const float* sums, float* dst,
                                              Value&& value) {
  if (lanes == kWidth) {
    for (std::int64_t i = 0; i < count; ++i, dst += t.dst_pixel, sums += kWidth) {
      value(Vec::loadu(sums), dst).store(dst);
    }
    return;
  }
  // 0 weights times an infinite src is not 0.
  const Vec mask = lanes_mask(lanes);
  for (std::int64_t i = 0; i < count; ++i, dst += t.dst_pixel, sums += kWidth) {
    const Vec finished = value(Vec::loadu(sums), dst);
    t.has_tail ? (finished & mask).store(dst) : store(finished, dst, lanes);
  }
}

void finish_tile(const AmxTiles& t, Finishing& f) {
  const auto [tile, vector] = std::pair(f.next / f.vectors, f.next % f.vectors);
  const float* sums = f.from + f.next * kTileFloats;
  ++f.next;
  const Place& place = f.places[static_cast<std::size_t>(tile)];
  const std::int64_t first = f.first + vector * Amx::kWidth;
  const std::int64_t lanes = std::min(Amx::kWidth, t.channels - first);
  const Vec bias = t.bias ? load(t.bias + first, lanes) : Vec(0.f);
  float* dst = t.dst + place.dst + first / Amx::kWidth * t.dst_vector;
  const auto store_all = [&](auto&& value) TORCH_BLOCKED_INLINE {
    store_values(t, place.count, lanes, sums, dst, value);
  };
  const auto& [before, after, has_residual] = t.epilogue;
  const Activation& last = has_residual ? after : before;
  const bool bounds = last.kind == Activation::Kind::kNone || last.kind == Activation::Kind::kClamp;
  if (!bounds || (has_residual && before.kind != Activation::Kind::kNone)) {
    with_finish(t.epilogue, t.residual, t.dst, [&](const auto& finish) {
      store_all([&](const Vec& sum, float* to)
                    TORCH_BLOCKED_INLINE { return finish(sum + bias, to, lanes); });
    });
    return;
  }
  // Bounds alone need no test of the activation at each vector: a 1x1 of 64 channels takes 0.9 of
  // the time.
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const bool clamps = last.kind == Activation::Kind::kClamp;
  const Vec least(clamps ? last.alpha : -kInfinity), most(clamps ? last.beta : kInfinity);
  if (has_residual) {
    const std::int64_t distance = t.residual - t.dst;
    store_all([&](const Vec& sum, float* to) TORCH_BLOCKED_INLINE {
      return at::vec::clamp(sum + bias + load(to + distance, lanes), least, most);
    });
  } else {
    store_all([&](const Vec& sum, float*)
                  TORCH_BLOCKED_INLINE { return at::vec::clamp(sum + bias, least, most); });
  }
}

// Segments [begin, end). Their weights stay in L2 while all pixels go over them.
struct Part {
  std::int64_t begin, end;
  bool first, last;
};

// Sums some tiles of pixels and vectors of channels over a part, and adds to `sums` unless it is
// the first part. Between the products it finishes tiles of `before` and splits rows of `next`.
template <int kTiles, int kVectors>
void multiply(const AmxTiles& t, const Part& part, const std::uint8_t* weights, Splitting& next,
              std::int64_t rows, const Place* places, float* sums, Finishing& before) {
  constexpr std::int64_t kStep = Amx::kWeightBytes * kVectors;
  unrolled<kTiles * kVectors>([&]<int i>() TORCH_BLOCKED_INLINE {
    if (part.first) {
      clear_tile<i>();
    } else {
      load_tile<i>(sums + i * kTileFloats, 64);
    }
  });
  const std::int64_t step = t.slot_step, count = part.end - part.begin;
  for (std::int64_t s = 0; s < count; ++s, weights += kStep) {
    std::array<const std::uint8_t*, kTiles> src;
    unrolled<kTiles>([&]<int i>() TORCH_BLOCKED_INLINE {
      src[i] = t.slots + places[i].slot + t.segments[part.begin + s];
    });
    unrolled<kProducts.size()>([&]<int i>() TORCH_BLOCKED_INLINE {
      multiply_parts<kTiles, kVectors, i>(src, step, weights, next, rows);
    });
    while (before.next * count < before.count * (s + 1)) finish_tile(t, before);
  }
  unrolled<kTiles * kVectors>([&]<int i>()
                                  TORCH_BLOCKED_INLINE { store_tile<i>(sums + i * kTileFloats); });
}

// The tiles of one row of dst, which differ by at most a pixel.
struct Row {
  std::int64_t pixels, tiles;

  std::int64_t begin(std::int64_t tile) const { return tile * pixels / tiles; }
  std::int64_t most() const { return (pixels + tiles - 1) / tiles; }
};

// A single tile would wait for its own sums, so a lone row has an even number of tiles.
Row row_of(const AmxTiles& t) {
  std::int64_t tiles = (t.pixels + Amx::kPixels - 1) / Amx::kPixels;
  if (t.rows == 1 && tiles > 1) tiles = (tiles + 1) / 2 * 2;
  return {t.pixels, tiles};
}

Place place_of(const AmxTiles& t, const Row& row, std::int64_t tile) {
  const std::int64_t y = tile / row.tiles, part = tile % row.tiles, x = row.begin(part);
  return {y * t.slot_row + x * t.slot_step, y * t.dst_row + x * t.dst_pixel,
          row.begin(part + 1) - x};
}

// A block of products: some vectors of channels from `first` on, over a part of the sums.
struct Block {
  Part part;
  std::int64_t first, vectors;
  const float* weights;
};

// Runs tiles of pixels, kMost at a time, over one block.
template <int kMost, int kVectors>
void run_block(const AmxTiles& t, const Row& row, const Block& block, const std::uint8_t* weights,
               Splitting& next, std::array<Finishing, 2>& finishing, int& now) {
  const Part& part = block.part;
  const std::int64_t all = t.rows * row.tiles, quads = (all + kMost - 1) / kMost;
  const auto products = static_cast<std::int64_t>(kProducts.size()) * (part.end - part.begin);
  const std::int64_t rows = (next.count + quads * products - 1) / (quads * products);
  for (std::int64_t tile = 0; tile < all; tile += kMost) {
    Finishing& own = finishing[static_cast<std::size_t>(now)];
    Finishing& before = finishing[static_cast<std::size_t>(now ^ 1)];
    const std::int64_t count = std::min<std::int64_t>(kMost, all - tile);
    for (std::int64_t i = 0; i < count; ++i) {
      own.places[static_cast<std::size_t>(i)] = place_of(t, row, tile + i);
    }
    const bool whole = part.first && part.last;
    float* sums = whole ? own.sums : t.sums + tile * kVectors * kTileFloats;
    const auto run = [&]<int kTiles>() {
      multiply<kTiles, kVectors>(t, part, weights, next, rows, own.places.data(), sums, before);
    };
    if (count == kMost) {
      run.template operator()<kMost>();
    } else if (count == 1) {
      run.template operator()<1>();
    } else if constexpr (kMost > 2) {
      count == 2 ? run.template operator()<2>() : run.template operator()<3>();
    }
    if (!part.last) continue;
    own.from = sums;
    own.vectors = kVectors;
    own.first = block.first;
    own.next = 0;
    own.count = count * kVectors;
    now ^= 1;
  }
}

// The blocks in order: all parts of a pair of vectors (or of a last single one), then those of the
// next pair.
class Blocks {
 public:
  explicit Blocks(const AmxTiles& t)
      : t_(t),
        parts_((t.count + Amx::kPartSegments - 1) / Amx::kPartSegments),
        count_((t.channels + 2 * Amx::kWidth - 1) / (2 * Amx::kWidth) * parts_) {}

  std::int64_t count() const { return count_; }
  Block operator[](std::int64_t i) const {
    const std::int64_t first = i / parts_ * 2 * Amx::kWidth, part = i % parts_;
    const std::int64_t begin = part * t_.count / parts_, end = (part + 1) * t_.count / parts_;
    const std::int64_t vectors = t_.channels - first > Amx::kWidth ? 2 : 1;
    return {
        .part = {begin, end, part == 0, part + 1 == parts_},
        .first = first,
        .vectors = vectors,
        .weights = t_.weights + (first * t_.count + vectors * Amx::kWidth * begin) * Amx::kLanes};
  }

 private:
  const AmxTiles& t_;
  std::int64_t parts_, count_;
};

}  // namespace

void amx_tiles(const AmxTiles& t) {
  const Row row = row_of(t);
  const Blocks blocks(t);
  configure(row.most());
  std::array<Finishing, 2> finishing;
  int now = 0;
  const auto buffer = [&](std::int64_t i) {
    return t.weight_parts + i % 2 * Amx::kPartSegments * 2 * Amx::kWeightBytes;
  };
  const auto splitting = [&](std::int64_t i) {
    if (i == blocks.count()) return Splitting{};
    const Block block = blocks[i];
    return Splitting{block.weights, buffer(i), block.vectors, 0,
                     (block.part.end - block.part.begin) * Amx::kLanes / 2 * block.vectors};
  };
  Splitting next = splitting(0);
  for (std::int64_t i = 0; i < blocks.count(); ++i) {
    next.advance(next.count);  // the remaining rows
    next = splitting(i + 1);
    const Block block = blocks[i];
    const auto run = block.vectors == 2 ? run_block<2, 2> : run_block<4, 1>;
    run(t, row, block, buffer(i), next, finishing, now);
  }
  Finishing& last = finishing[static_cast<std::size_t>(now ^ 1)];
  while (last.next < last.count) finish_tile(t, last);
  release();
}

void amx_split(const AmxSplit& s) {
  const std::int64_t steps = (s.channels + Amx::kLanes - 1) / Amx::kLanes;
  for (std::int64_t step = 0; step < steps; ++step) {
    const std::int64_t left = s.channels - step * Amx::kLanes;
    const auto lanes = [&](std::int64_t from) {
      return static_cast<__mmask16>((1u << std::clamp<std::int64_t>(left - from, 0, 16)) - 1);
    };
    const __mmask16 low = lanes(0), high = lanes(16);
    const float* src = s.src + 2 * step * s.vector;
    std::uint8_t* to = s.slots + step * s.step_bytes;
    for (std::int64_t i = 0; i < s.count; ++i, src += s.pixel, to += Amx::kSlotBytes) {
      store_parts(parts_of(_mm512_maskz_loadu_ps(low, src)),
                  parts_of(_mm512_maskz_loadu_ps(high, src + s.vector)), to, kPartBytes);
    }
  }
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
