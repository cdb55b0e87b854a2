// Winograd convolution and the gradient of its weight: the arguments of the kernels, and the
// kernels that each kind of tile has.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/dots/dots.h"

namespace torch_blocked::kernels {

// A convolution of blocked src [N, groups x SRC_IC/b, *in, b] to blocked dst. Along the dims of a
// tile the stride is 1, or 2 for tiles at stride 2. Along other dims it is arbitrary. Sizes are d,
// h, w, reordered so that the dims of a tile come last; missing dims are 1. The kernels run one
// group. If there are several groups, their channels fill whole blocks.
//
// A kernel with more taps than a tile's transform is split into `parts` along each dim. Each part
// counts as further channels of src: ic = parts x src_ic padded to whole blocks. src is transformed
// once for each part.
struct WinogradShape {
  std::int64_t ic, oc, block, src_ic;
  std::array<std::int64_t, 3> in, out, padding;
  std::array<std::int64_t, 3> in_steps,
      out_steps;           // numbers from one plane, row, pixel to the next
  std::int64_t out_block;  // and from one block of channels of dst
  bool stream;             // write dst past the cache
  std::array<std::int64_t, 3> stride{1, 1, 1}, dilation{1, 1, 1}, parts{1, 1, 1};
  std::int64_t groups = 1;          // of src_ic and oc channels, beside each other in src and dst
  std::uint8_t padding_number = 0;  // what stands for 0, in src of bytes
};

// Where the tiles of `m` outputs begin along one dim. A tile's outputs are `dilation` apart, as its
// taps are. So there are `dilation` phases, each with as many tiles as the first.
struct WinogradAlong {
  std::int64_t phases, tiles, step;  // tiles of a phase, and from one to the next

  WinogradAlong(std::int64_t out, std::int64_t m, std::int64_t dilation)
      : phases(out < dilation ? out : dilation),
        tiles(((out + dilation - 1) / dilation + m - 1) / m),
        step(m * dilation) {}
  std::int64_t count() const { return phases * tiles; }
};

// `count` tiles of dst from `first` on. They are numbered along w, phase by phase, then along h and
// d, then through the images.
struct WinogradTiles {
  std::int64_t first, count;
};

// Where the result goes, and the epilogue before.
struct WinogradDst {
  const float* bias;     // may be null
  const void* residual;  // of dst's type; may be null
  void* dst;
  Epilogue epilogue;
  // For bytes, instead of bias and epilogue: as in DotTiles, with the channels of all vectors.
  const DotChannels* channels = nullptr;
  const DotEnd* end = nullptr;
  float residual_scale = 0;
  bool is_float32 = false;
  // For fixed point: the factor of each channel's outputs.
  const float* scales = nullptr;
};

// Weights with strides in elements. So OC and IC may be exchanged, and negative strides flip the
// kernel.
struct WinogradWeights {
  const float* data;
  std::int64_t oc, ic;
  std::int64_t oc_stride, ic_stride, d_stride, h_stride, w_stride;
};

// Winograd F(m x m, 3x3). A tile of m x m outputs has (m + 2)^2 positions, each with one product,
// instead of 9 m^2 products. With F(2, 3) along depth for 3x3x3, 2 x m x m outputs cost 4 (m + 2)^2
// instead of 54 m^2. With F(m, 3) along w alone, m outputs of a row cost m + 2 instead of 3 m. At
// stride 2, m x m outputs cost (2 m + 1)^2 instead of 9 m^2, with (m + 2)^2 weights. There are
// three steps for some tiles. The last two run for one group of `channels` output channels:
//   src:      V[position, tile, ic]  = B^T src B
//   multiply: M[position, tile, oc]  = sum over ic of V[position, tile, ic] U[position, ic, oc]
//   dst:      dst                    = epilogue(A^T M A + bias)
// `weights` makes U = G weights G^T once. The caller provides V and M with v_size() and m_size()
// floats; their inner order is private to the kernels. src and dst are float32, or bfloat16 if
// blocks are whole vectors; V and U are float32 or bfloat16. All else is float32. For bytes of src
// and weights, V and U are words, their products are exact, and M is 24^2 = 576 times too large. In
// fixed point V and U are words too, and V ends with a scale for each tile.
struct Winograd {
  std::array<std::int64_t, 3> tile, taps;    // outputs along d, h, w; taps of a part of a kernel
  std::int64_t positions, position_weights;  // and how many transformed weights they use
  void (*src)(const WinogradShape& shape, WinogradTiles tiles, const void* src, void* v);
  void (*multiply)(const WinogradShape& shape, std::int64_t tiles, std::int64_t group,
                   const void* v, const void* u, float* m);
  void (*dst)(const WinogradShape& shape, WinogradTiles tiles, std::int64_t group, const float* m,
              const WinogradDst& dst);
  // Fills U for one vector of output channels from `channel` on, for ic in [begin, end).
  void (*weights)(const WinogradWeights& weights, std::int64_t channel, std::int64_t begin,
                  std::int64_t end, std::int64_t padded_oc, void* u);
  // Only in fixed point, else null: the factors with which the weights of a vector of output
  // channels from `channel` on become the largest words that sums allow.
  void (*weight_scales)(const WinogradWeights& weights, std::int64_t channel, float* scales);
  std::int64_t channels;        // output channels of a group: 2 vectors
  std::int64_t input_channels;  // of one 32-bit product; U has whole products, `begin` starts one
  // The tiles multiplied at a time. A block of tiles should be a multiple of it.
  std::int64_t group_tiles;
  std::int64_t (*v_size)(const WinogradShape& shape, std::int64_t tiles);
  std::int64_t (*m_size)(const WinogradShape& shape, std::int64_t tiles);
};

// The gradient of a 3x3 kernel by tiles of 4x4 of diff_dst, with a quarter of the products:
//   V = B^T src B,  D = A diff_dst A^T,  sums = sum over tiles of V D,  diff_weights = G^T sums G
// V and D are [positions, channel vectors, slab, width] for a slab of tiles. tiles.count of them
// are transformed, the rest is 0. Positions lie `stride` floats apart.
struct WinogradGradient {
  std::int64_t m, positions;
  void (*src)(const WinogradShape& shape, WinogradTiles tiles, std::int64_t slab, const float* src,
              float* v);
  void (*diff_dst)(const WinogradShape& shape, WinogradTiles tiles, std::int64_t slab,
                   const float* diff_dst, float* d);
  std::int64_t (*stride)(std::int64_t channels, std::int64_t slab);
  // For one vector. Sums of positions lie `position_stride` apart, taps `tap_stride` apart.
  void (*weights)(const float* sums, std::int64_t position_stride, float* diff_weights,
                  std::int64_t tap_stride);
};

}  // namespace torch_blocked::kernels
