// Our SIMD kernels: raw pointers and sizes, no tensors, no threads. Each source here is compiled
// once per instruction set into the namespace of that set; kernels() gives the table of the one in
// use.
//
// A kernel works on the range [begin, end) of its outermost unit, so that the caller shares the
// work among threads. `block` is the channel block b; lanes are the b channels of one pixel.
#pragma once

#include <array>
#include <cstdint>

namespace torch_blocked::kernels {

// f of one value; all of them have f(0) = 0, so that the zero tail stays zero.
struct Activation {
  enum class Kind : std::int64_t { kNone, kClamp, kLeakyRelu, kHardswish, kSilu };
  Kind kind = Kind::kNone;
  float alpha = 0, beta = 0;  // kClamp: least and greatest; kLeakyRelu: the slope below 0
};

// What becomes of a sum before it is stored: after(before(sum) + residual), where the residual has
// the format of dst. Kernels apply it through kernels/epilogue.h.
struct Epilogue {
  Activation before, after;
  bool residual = false;  // false: `after` is kNone

  bool empty() const { return before.kind == Activation::Kind::kNone && !residual; }
};

// Lanes of a pixel's src whose weights follow each other: src[offset] to src[offset + lanes - 1]
// meet the weights of lane `weights` on.
struct DirectSegment {
  std::int64_t offset, lanes, weights;
};

// A direct convolution of some pixels and at most 3 vectors of output channels:
//   dst[pixel, oc] = activation(bias[oc] + residual[pixel, oc] + sum over segments and lanes of
//                               src[pixel * step + offset + lane] * weights[first + lane, oc])
// where the step is one vector, or one float in planes, and `first` the segment's first weight.
struct DirectTiles {
  const float* src;
  const DirectSegment* segments;  // `count`, and one more, which is prefetched only
  std::int64_t count;
  const float* weights;   // [lanes, vectors * width]
  const float* bias;      // [channels], or null
  const float* residual;  // laid out as dst, which it may be; or null
  float* dst;
  std::int64_t pixels;    // at dst_step floats from each other
  std::int64_t vectors;   // of output channels
  std::int64_t channels;  // that are not tail, at most vectors * width
  std::int64_t dst_step;
  std::array<std::int64_t, 3> dst_offsets;  // of the vectors
  // Blocks of dst_step lanes, narrower than a vector, that the channels fill; 0: blocks are at
  // least as wide. They take only one part of the sum, no residual and no activation.
  std::int64_t parts, part_stride;
  // A sum in several parts, of some segments each, grows in dst. The first has bias and
  // residual, and overwrites dst; the last has the activation.
  bool first, last;
  // Floats from these weights to those that come next, to be prefetched by the first tiles; and how
  // many tiles have had these weights already.
  std::int64_t ahead, tile;
  bool stream;  // write dst past the cache
  Activation activation;
};

// What the kernels of direct convolution are made for.
struct DirectSizes {
  std::int64_t width;                  // of a vector
  std::int64_t vectors;                // of output channels at a time, best
  std::array<std::int64_t, 3> pixels;  // at a time with 1, 2, 3 vectors
  std::int64_t lanes;                  // of one part of a sum
  std::int64_t band_bytes;             // of src that are worked on at a time
};

// src positions first, first + stride, ... in `count` slots from `slot` on.
struct DirectRun {
  std::int64_t slot, count, first;
};

// The src under some output pixels, padded, in slots: one dim after the other, the positions that
// output pixels meet at one tap of the kernel lie side by side whatever the stride.
struct DirectBand {
  const float* src;  // an image [blocks, d, h, w, block]
  float* slots;      // [vectors, d, h, w, width], planes [channels, d, h, w]
  std::int64_t channels, block, block_stride;
  std::array<std::int64_t, 3> in;  // src positions: d, h, w
  const std::int64_t *d, *h;       // position of each slot
  std::int64_t d_slots, h_slots, w_slots;
  const DirectRun* runs;  // of w
  std::int64_t run_count, w_stride;
};

// One spatial dim of a depthwise or grouped convolution: output o of `out` reads the input indices
// origin + o * stride + tap * dilation and goes to index dst_first + o * dst_step of dst.
struct GroupedAxis {
  std::int64_t in, out, dst, kernel;
  std::int64_t origin, stride, dilation;
  std::int64_t dst_first, dst_step;
};

// How a vector of output channels finds one input channel each in a vector of src.
struct LaneSource {
  std::int64_t block;                  // of src
  std::int64_t count;                  // in the first of them: how many there are
  std::array<std::int32_t, 16> lanes;  // for each output lane one of the block; -1: not here
};

// A convolution whose output channels see few input channels each. The block must be a whole vector
// of the kernels' instruction set.
struct GroupedConvolution {
  std::array<GroupedAxis, 3> axes;  // d, h, w
  std::int64_t src_blocks, dst_blocks, oc;
  std::int64_t inputs;  // input channels that an output channel sees; depthwise: 1
  std::int64_t part;    // pixels of a row that are a unit of work
  // [dst_blocks, inputs, sources]: the vectors that hold an input for a vector of outputs
  const LaneSource* lanes;
  std::int64_t sources;
  const float* src;              // [N, src_blocks, ID, IH, IW, block]
  const float* weights;          // [dst_blocks, KD, KH, inputs, KW, block]
  const float *bias, *residual;  // [oc] and as dst, or null
  float* dst;                    // [N, dst_blocks, OD, OH, OW, block]
  Epilogue epilogue;
};

// Parts [begin, end) of output rows, numbered along w, then h, d, blocks and images.
using RunGrouped = void (*)(const GroupedConvolution& convolution, std::int64_t begin,
                            std::int64_t end);

// The gradient of a depthwise weight from one channel block of one image; sizes are d, h, w.
struct DepthwiseGradient {
  const float* src;       // [ID, IH, IW, block]
  const float* diff_dst;  // [OD, OH, OW, block]
  float* diff_weights;    // [KD, KH, KW, block], added to
  std::int64_t block;
  std::array<std::int64_t, 3> in, out, kernel, stride, padding, dilation;
};

// sums[i, j] = sum over images, rows and pixels of a[.., i] * b[.., j], or adds it to sums. i
// counts channels of a, j vectors of b; channels lie in blocks, which are whole vectors of b.
struct OuterProducts {
  const float *a, *b;
  float* sums;
  std::int64_t images, rows, pixels;
  std::int64_t a_image, a_row, a_pixel, b_image, b_row, b_pixel;  // strides
  std::int64_t a_ahead, b_ahead;  // from a pixel to the one that the next call begins with
  std::int64_t a_count, a_block, a_block_stride;
  std::int64_t b_first, b_vectors, b_block, b_block_stride;  // from vector b_first on
  std::int64_t sums_row, sums_vector;
  bool add;
};

// A reorder of one image between dense and blocked [blocks, pixels, block], 4-byte elements.
struct ImageReorder {
  const float* src;
  float* dst;
  std::int64_t channels, block, pixels;
  bool stream;  // write past the cache
};

// A convolution with a 3x3, 1x3x3 or 3x3x3 kernel and stride 1, blocked src [N, IC/b, *in, b] and
// dst. Sizes are d, h, w; d is 1 in 2-D.
struct WinogradShape {
  std::int64_t ic, oc, block;
  std::array<std::int64_t, 3> in, out, padding;
  bool stream;  // write dst past the cache
};

// `count` tiles of dst from `first` on, numbered along w, then h and d, then through the images.
struct WinogradTiles {
  std::int64_t first, count;
};

// Where the result goes, and what is done to it before.
struct WinogradDst {
  const float *bias, *residual;  // may be null
  float* dst;
  Epilogue epilogue;
};

// Weights by strides in elements (negative ones flip the kernel), ready for any roles of OC and IC.
struct WinogradWeights {
  const float* data;
  std::int64_t oc, ic;
  std::int64_t oc_stride, ic_stride, d_stride, h_stride, w_stride;
};

// Winograd F(m x m, 3x3): a tile of m x m outputs costs (m + 2)^2 products instead of 9 m^2, its
// positions; with F(2, 3) along depth for 3x3x3, 2 x m x m outputs cost 4 (m + 2)^2 instead of
// 54 m^2. Three steps on some tiles, the last two for one group of channels() output channels:
//   src:      V[position, tile, ic]  = B^T src B
//   multiply: M[position, tile, oc]  = sum over ic of V[position, tile, ic] U[position, ic, oc]
//   dst:      dst                    = epilogue(A^T M A + bias)
// with U = G weights G^T made once by `weights`. V and M are the caller's, v_size() and m_size()
// floats; their inner order is the kernels' own.
struct Winograd {
  std::array<std::int64_t, 3> tile;  // outputs along d, h, w
  std::int64_t positions;
  void (*src)(const WinogradShape& shape, WinogradTiles tiles, const float* src, float* v);
  void (*multiply)(const WinogradShape& shape, std::int64_t tiles, std::int64_t group,
                   const float* v, const float* u, float* m);
  void (*dst)(const WinogradShape& shape, WinogradTiles tiles, std::int64_t group, const float* m,
              const WinogradDst& dst);
  // Fills U for the vector of width() output channels from `channel` on, ic in [begin, end).
  void (*weights)(const WinogradWeights& weights, std::int64_t channel, std::int64_t begin,
                  std::int64_t end, std::int64_t padded_oc, float* u);
  std::int64_t channels;  // output channels of a group: 2 vectors
  std::int64_t
      group_tiles;  // tiles multiplied at a time: a block of tiles is best a multiple of it
  std::int64_t (*v_size)(const WinogradShape& shape, std::int64_t tiles);
  std::int64_t (*m_size)(const WinogradShape& shape, std::int64_t tiles);
};

// Where a lane of dst comes from: element `offset` of source `src`; -1: it is zero.
struct GatheredLane {
  std::int64_t src, offset;
};

// One pixel after the other, its lanes from anywhere: dst[lane] = srcs[src][offset]. The sources
// begin with a block and have the same stride between pixels; 4-byte elements.
struct LaneGather {
  const float* const* srcs;
  const GatheredLane* lanes;  // [block]
  float* dst;
  std::int64_t block, pixels, src_stride, dst_stride;
};

// Rows of `pixels` times `block` values, reduced over the rows, and over the lanes of a pixel too
// if `lanes`: one image [ceil(channels / block), pixels, block], to be walked over its channels.
// Without `lanes`, any [channels / block, pixels, block].
struct ChannelRows {
  std::int64_t channels, block, pixels;
  bool lanes;
};

// Pixels of one channel block as weighted sums of others: `taps` offsets and weights per pixel,
// [pixels, taps]; offsets count elements, of pixels of an image in the same channel block.
struct PixelTaps {
  const std::int64_t* offsets;
  const float* weights;
  std::int64_t taps, pixels, block;
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

// dst [rows, outputs] = activation(src [rows, inputs] times weights + bias) for blocks [begin, end)
// of outputs; weights [blocks, | inputs, block | + what is left of weights_stride].
struct LinearRows {
  static constexpr std::int64_t kMostRows = 8, kMostVectors = 4;
  const float *src, *weights;
  const float* bias;  // or null
  float* dst;
  std::int64_t rows, inputs, outputs;
  std::int64_t block, weights_stride;  // whole vectors, at most kMostVectors
  Activation activation;
};

// What becomes of the value that opens a channel.
enum class Gate : std::uint8_t { kSigmoid, kHardsigmoid };

// Pixels of one channel block: dst = epilogue(src * gate(gates)), all [pixels, block] but gates,
// which are one for each of the `channels` that are not tail. dst may be src or residual.
struct GatedPixels {
  const float *src, *gates, *residual;
  float* dst;
  std::int64_t block, pixels, channels;
  Gate gate;
  Epilogue epilogue;
};

struct Kernels {
  // nhwc [pixels, channels] -> blocked for pixels [begin, end), zero tail included; and back.
  void (*block_channels)(const ImageReorder& reorder, std::int64_t begin, std::int64_t end);
  void (*unblock_channels)(const ImageReorder& reorder, std::int64_t begin, std::int64_t end);

  // nchw [channels, pixels] -> blocked, likewise.
  void (*block_planes)(const ImageReorder& reorder, std::int64_t begin, std::int64_t end);
  void (*unblock_planes)(const ImageReorder& reorder, std::int64_t begin, std::int64_t end);

  // dst[row, pixel, lane] = src[row, pixel, lane] * scale[row, lane] + shift[row, lane] for rows
  // [begin, end); a row is one channel block of one image; scale and shift have `periods` rows and
  // repeat.
  void (*affine)(const float* src, const float* scale, const float* shift, float* dst,
                 std::int64_t block, std::int64_t pixels, std::int64_t periods, std::int64_t begin,
                 std::int64_t end);

  // One channel block: dst[pixel, dst_lane + i] = src[pixel, src_lane + i] for i in [0, count) and
  // all pixels; both are [pixels, block] of 4-byte elements. Other lanes of dst stay as they are.
  void (*copy_lanes)(const float* src, float* dst, std::int64_t block, std::int64_t pixels,
                     std::int64_t src_lane, std::int64_t dst_lane, std::int64_t count);

  // Of one channel block, src [pixels, block]: the sum of every lane; with the sum of squared
  // deviations from the mean of these pixels; the sums of diff_dst and of diff_dst * (src - mean).
  void (*sum_pixels)(const float* src, std::int64_t block, std::int64_t pixels, float* sum);
  void (*moments)(const float* src, std::int64_t block, std::int64_t pixels, float* sum,
                  float* squares);
  void (*gradient_sums)(const float* diff_dst, const float* src, const float* mean,
                        std::int64_t block, std::int64_t pixels, float* sum, float* dot);

  // diff_src = diff_dst * diff_scale + (src - mean) * src_scale + shift, rows and periods as in
  // affine.
  void (*normalisation_gradient)(const float* diff_dst, const float* src, const float* mean,
                                 const float* diff_scale, const float* src_scale,
                                 const float* shift, float* diff_src, std::int64_t block,
                                 std::int64_t pixels, std::int64_t periods, std::int64_t begin,
                                 std::int64_t end);

  void (*gather_lanes)(const LaneGather& gather);

  // Of pixels [begin, end) of an image, over its channels. channel_sum: one value per pixel;
  // channel_argmax: of sign * src, the first
  // NaN or else the first greatest.
  void (*softmax)(const ChannelRows& rows, const float* src, float* dst, std::int64_t begin,
                  std::int64_t end);
  void (*log_softmax)(const ChannelRows& rows, const float* src, float* dst, std::int64_t begin,
                      std::int64_t end);
  void (*softmax_gradient)(const ChannelRows& rows, const float* diff_dst, const float* dst,
                           float* diff_src, std::int64_t begin, std::int64_t end);
  void (*log_softmax_gradient)(const ChannelRows& rows, const float* diff_dst, const float* dst,
                               float* diff_src, std::int64_t begin, std::int64_t end);
  void (*channel_sum)(const ChannelRows& rows, const float* src, float* sums, std::int64_t begin,
                      std::int64_t end);
  void (*channel_argmax)(const ChannelRows& rows, const float* src, float sign,
                         std::int64_t* indices, std::int64_t begin, std::int64_t end);

  // dst[pixel] = sum over the taps of weight * src[offset]; its transpose, added to diff_src; and
  // dots[pixel, tap] += diff_dst[pixel] . src[offset], over the lanes.
  void (*sample_pixels)(const PixelTaps& taps, const float* src, float* dst);
  void (*spread_pixels)(const PixelTaps& taps, const float* diff_dst, float* diff_src);
  void (*dot_pixels)(const PixelTaps& taps, const float* diff_dst, const float* src, float* dots);

  void (*depthwise_gradient)(const DepthwiseGradient& gradient);
  void (*outer_products)(const OuterProducts& products);
  void (*linear_rows)(const LinearRows& rows, std::int64_t begin, std::int64_t end);
  void (*gate_pixels)(const GatedPixels& pixels);
  std::int64_t width;  // floats of a vector

  // Output channel i sees input channel i only; `lanes` is null.
  RunGrouped depthwise;
  // grouped_broadcast: a vector of output channels sees the same input channel in all lanes.
  // grouped_permute: its input channels lie in one vector or two; grouped_gather: in any number.
  RunGrouped grouped_broadcast, grouped_permute, grouped_gather;

  const DirectSizes* direct_sizes;
  void (*direct_tiles)(const DirectTiles& tiles);
  void (*direct_plane_tiles)(const DirectTiles& tiles);
  void (*direct_band)(const DirectBand& band);  // fills the slots
  void (*direct_plane_band)(const DirectBand& band);

  // dst = epilogue(dst) for `count` floats; residual and dst may be the same.
  void (*finish)(const Epilogue& epilogue, const float* residual, float* dst, std::int64_t count);

  // Does nothing but independent FMAs in registers, and returns how many floating-point operations.
  std::int64_t (*fma_rounds)(std::int64_t rounds);

  const WinogradGradient* winograd_gradient;
  // F(2x2, 3x3) and F(4x4, 3x3); for 3x3x3; F(3x3, 4x4)
  const Winograd *winograd2, *winograd4, *winograd2_3d, *winograd4_3d, *winograd3;
};

// The table of the instruction set in use (runtime/isa.h).
const Kernels& kernels();

// The same, or that of a lesser set whose vectors are no wider than a block: half-filled AVX-512
// vectors move 8c at a third of the speed of AVX2's.
const Kernels& kernels_for(std::int64_t block);

}  // namespace torch_blocked::kernels
