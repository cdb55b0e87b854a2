// The kernels of one instruction set, as the sources define them; included by those sources only.
#pragma once

#include "kernels/kernels.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

void block_channels(const float* src, float* dst, std::int64_t channels, std::int64_t block,
                    std::int64_t pixels, std::int64_t begin, std::int64_t end);
void unblock_channels(const float* src, float* dst, std::int64_t channels, std::int64_t block,
                      std::int64_t pixels, std::int64_t begin, std::int64_t end);
void affine(const float* src, const float* scale, const float* shift, float* dst,
            std::int64_t block, std::int64_t pixels, std::int64_t periods, std::int64_t begin,
            std::int64_t end);
void copy_lanes(const float* src, float* dst, std::int64_t block, std::int64_t pixels,
                std::int64_t src_lane, std::int64_t dst_lane, std::int64_t count);
void direct_row(const DirectRow& row);
std::int64_t direct_channels();

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
