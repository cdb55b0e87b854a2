// The kernels of one instruction set, as the sources define them; included by those sources only.
#pragma once

#include "kernels/kernels.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

void block_channels(const ImageReorder& reorder, std::int64_t begin, std::int64_t end);
void unblock_channels(const ImageReorder& reorder, std::int64_t begin, std::int64_t end);
void block_planes(const ImageReorder& reorder, std::int64_t begin, std::int64_t end);
void unblock_planes(const ImageReorder& reorder, std::int64_t begin, std::int64_t end);
void affine(const float* src, const float* scale, const float* shift, float* dst,
            std::int64_t block, std::int64_t pixels, std::int64_t periods, std::int64_t begin,
            std::int64_t end);
void copy_lanes(const float* src, float* dst, std::int64_t block, std::int64_t pixels,
                std::int64_t src_lane, std::int64_t dst_lane, std::int64_t count);
void sum_pixels(const float* src, std::int64_t block, std::int64_t pixels, float* sum);
void moments(const float* src, std::int64_t block, std::int64_t pixels, float* sum, float* squares);
void gradient_sums(const float* diff_dst, const float* src, const float* mean, std::int64_t block,
                   std::int64_t pixels, float* sum, float* dot);
void normalisation_gradient(const float* diff_dst, const float* src, const float* mean,
                            const float* diff_scale, const float* src_scale, const float* shift,
                            float* diff_src, std::int64_t block, std::int64_t pixels,
                            std::int64_t periods, std::int64_t begin, std::int64_t end);
void gather_lanes(const LaneGather& gather);
void softmax(const ChannelRows& rows, const float* src, float* dst, std::int64_t begin,
             std::int64_t end);
void log_softmax(const ChannelRows& rows, const float* src, float* dst, std::int64_t begin,
                 std::int64_t end);
void softmax_gradient(const ChannelRows& rows, const float* diff_dst, const float* dst,
                      float* diff_src, std::int64_t begin, std::int64_t end);
void log_softmax_gradient(const ChannelRows& rows, const float* diff_dst, const float* dst,
                          float* diff_src, std::int64_t begin, std::int64_t end);
void channel_sum(const ChannelRows& rows, const float* src, float* sums, std::int64_t begin,
                 std::int64_t end);
void channel_argmax(const ChannelRows& rows, const float* src, float sign, std::int64_t* indices,
                    std::int64_t begin, std::int64_t end);
void sample_pixels(const PixelTaps& taps, const float* src, float* dst);
void spread_pixels(const PixelTaps& taps, const float* diff_dst, float* diff_src);
void dot_pixels(const PixelTaps& taps, const float* diff_dst, const float* src, float* dots);
void depthwise_gradient(const DepthwiseGradient& gradient);
void depthwise(const GroupedConvolution& convolution, std::int64_t begin, std::int64_t end);
void grouped_broadcast(const GroupedConvolution& convolution, std::int64_t begin, std::int64_t end);
void grouped_permute(const GroupedConvolution& convolution, std::int64_t begin, std::int64_t end);
void grouped_gather(const GroupedConvolution& convolution, std::int64_t begin, std::int64_t end);
void direct_tiles(const DirectTiles& tiles);
void direct_plane_tiles(const DirectTiles& tiles);
void direct_band(const DirectBand& band);
void direct_plane_band(const DirectBand& band);
void outer_products(const OuterProducts& products);
void linear_rows(const LinearRows& rows, std::int64_t begin, std::int64_t end);
void gate_pixels(const GatedPixels& pixels);
void finish(const Epilogue& epilogue, const float* residual, float* dst, std::int64_t count);
std::int64_t fma_rounds(std::int64_t rounds);

extern const DirectSizes direct_sizes;
extern const Winograd winograd2, winograd4, winograd2_3d, winograd4_3d, winograd3;
extern const WinogradGradient winograd_gradient;
void winograd_multiply(const WinogradShape& shape, std::int64_t positions, std::int64_t tiles,
                       std::int64_t group, const float* v, const float* u, float* m);

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
