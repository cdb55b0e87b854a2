// Winograd convolution and its gradient by the weight: what its kernels take, and which kernels a
// kind of tile has.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/dots/dots.h"

namespace torch_blocked::kernels {

// A convolution, blocked src [N, groups x SRC_IC/b, *in, b] and dst, at stride 1 or, along dims
// that a tile at stride 2 is of, 2; along the others at any. Sizes are d, h, w in an order in which
// the dims that a tile is of come last; those that there are not are 1. The kernels run one group,
// whose channels fill whole blocks if there are several.
//
// A kernel of more taps than a tile's transform has is several kernels of as many taps, that many
// beside each other along each dim: `parts`. Those of one channel count as channels of src, which
// are then ic = parts x src_ic padded to whole blocks; src is transformed once for each.
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

// Where the tiles of `m` outputs begin along one dim: a tile's outputs are as far apart as taps, so
// that there are tiles of as many phases, each as many as the first has.
struct WinogradAlong {
  std::int64_t phases, tiles, step;  // tiles of a phase, and from one to the next

  WinogradAlong(std::int64_t out, std::int64_t m, std::int64_t dilation)
      : phases(out < dilation ? out : dilation),
        tiles(((out + dilation - 1) / dilation + m - 1) / m),
        step(m * dilation) {}
  std::int64_t count() const { return phases * tiles; }
};

// `count` tiles of dst from `first` on, numbered along w, phase by phase, then h and d, then
// through the images.
struct WinogradTiles {
  std::int64_t first, count;
};

// Where the result goes, and what is done to it before.
struct WinogradDst {
  const float* bias;     // may be null
  const void* residual;  // numbers as those of dst; may be null
  void* dst;
  Epilogue epilogue;
  // Of bytes, instead of bias and epilogue: as those of DotTiles, with channels of all vectors.
  const DotChannels* channels = nullptr;
  const DotEnd* end = nullptr;
  float residual_scale = 0;
  bool is_float32 = false;
  // Of fixed point: what outputs of each channel are multiplied by.
  const float* scales = nullptr;
};

// Weights by strides in elements, so that OC and IC may be exchanged and the kernel flipped (by
// negative strides).
struct WinogradWeights {
  const float* data;
  std::int64_t oc, ic;
  std::int64_t oc_stride, ic_stride, d_stride, h_stride, w_stride;
};

// Winograd F(m x m, 3x3): a tile of m x m outputs costs (m + 2)^2 products instead of 9 m^2, its
// positions; with F(2, 3) along depth for 3x3x3, 2 x m x m outputs cost 4 (m + 2)^2 instead of
// 54 m^2; with F(m, 3) along w alone m outputs of a row cost m + 2 instead of 3 m; at stride 2 m x
// m outputs cost (2 m + 1)^2 instead of 9 m^2, with (m + 2)^2 weights. Three steps on some tiles,
// the last two for one group of channels() output channels:
//   src:      V[position, tile, ic]  = B^T src B
//   multiply: M[position, tile, oc]  = sum over ic of V[position, tile, ic] U[position, ic, oc]
//   dst:      dst                    = epilogue(A^T M A + bias)
// with U = G weights G^T made once by `weights`. V and M are the caller's, v_size() and m_size()
// floats; their inner order is the kernels' own. src and dst are float32 or, on vectors of whole
// blocks, bfloat16; so are V and U, which are multiplied. All else is float32. Of src and weights
// of bytes V and U are words, whose products are exact, and M is 24^2 = 576 times what it
// should be. In fixed point V and U are words, too, and V ends with a scale for each tile.
struct Winograd {
  std::array<std::int64_t, 3> tile, taps;  // outputs along d, h, w, and taps of a part of a kernel
  std::int64_t positions, position_weights;  // and how many of these have weights of their own
  void (*src)(const WinogradShape& shape, WinogradTiles tiles, const void* src, void* v);
  void (*multiply)(const WinogradShape& shape, std::int64_t tiles, std::int64_t group,
                   const void* v, const void* u, float* m);
  void (*dst)(const WinogradShape& shape, WinogradTiles tiles, std::int64_t group, const float* m,
              const WinogradDst& dst);
  // Fills U for the vector of width() output channels from `channel` on, ic in [begin, end).
  void (*weights)(const WinogradWeights& weights, std::int64_t channel, std::int64_t begin,
                  std::int64_t end, std::int64_t padded_oc, void* u);
  // In fixed point, else null: factors of the weights of the vector of output channels from
  // `channel` on, with which they make the largest words that sums allow.
  void (*weight_scales)(const WinogradWeights& weights, std::int64_t channel, float* scales);
  std::int64_t channels;        // output channels of a group: 2 vectors
  std::int64_t input_channels;  // of one 32-bit product; U has whole ones, and `begin` is one's
  // Tiles multiplied at a time: a block of tiles is best a multiple of it.
  std::int64_t group_tiles;
  std::int64_t (*v_size)(const WinogradShape& shape, std::int64_t tiles);
  std::int64_t (*m_size)(const WinogradShape& shape, std::int64_t tiles);
};

// The gradient of a 3x3 kernel by tiles of 4x4 of diff_dst, with a quarter of the products:
//   V = B^T src B,  D = A diff_dst A^T,  sums = sum over tiles of V D,  diff_weights = G^T sums G
// V and D are [positions, channel vectors, slab, width] of a slab of tiles, of which tiles.count
// are transformed and the rest 0; `stride` floats lie between positions.
struct WinogradGradient {
  std::int64_t m, positions;
  void (*src)(const WinogradShape& shape, WinogradTiles tiles, std::int64_t slab, const float* src,
              float* v);
  void (*diff_dst)(const WinogradShape& shape, WinogradTiles tiles, std::int64_t slab,
                   const float* diff_dst, float* d);
  std::int64_t (*stride)(std::int64_t channels, std::int64_t slab);
  // One vector: the sums of a position lie `position_stride`, the taps `tap_stride` apart.
  void (*weights)(const float* sums, std::int64_t position_stride, float* diff_weights,
                  std::int64_t tap_stride);
};

}  // namespace torch_blocked::kernels
