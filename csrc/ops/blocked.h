// A blocked activation as the ops see it: an ordinary dense tensor in physical shape, plus the
// logical channel count. Nothing else tells dims and physical shape apart, so nothing else travels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <oneapi/dnnl/dnnl.hpp>
#include <string>
#include <vector>

#include "format/sizes.h"

namespace torch_blocked {

using Dims = std::vector<std::int64_t>;

// Blocks that stand for the plain formats: nchw is nC*1c, and nhwc has all channels in one block.
inline constexpr std::int64_t kPlain = 1, kChannelsLast = 0;

struct Blocked {
  at::Tensor physical;    // [N, ceil(C / block), *spatial, block], contiguous
  std::int64_t channels;  // C

  std::int64_t ndims() const { return physical.dim() - 1; }
  std::int64_t block() const { return physical.size(-1); }
  std::int64_t blocks() const { return physical.size(1); }  // ceil(C / block)
  std::int64_t batch() const { return physical.size(0); }
  std::int64_t tail() const {
    return channels % block();
  }  // lanes in use in the last block, 0: all
  std::int64_t pixels() const;  // product of the spatial dims
  Dims dims() const;            // [N, C, *spatial]
  dnnl::memory::desc md() const;
};

inline bool is_block(std::int64_t block) {
  return block == 4 || block == 8 || block == 16 || block == 32;
}

// Raises unless `tensor` is an ordinary CPU tensor all of whose elements lie in memory it owns, and
// products of its sizes fit 64 bits: what an op may take a pointer of. TypeError for another kind
// of tensor, ValueError for one whose memory is gone or too small.
void check_memory(const char* op, const at::Tensor& tensor);

// Raises TypeError for what a plain tensor has no elements of: quantized types, or a number that is
// no type.
void check_dtype(const char* op, at::ScalarType dtype);

// Raises ValueError for a block that there is no format for.
void check_block(const char* op, std::int64_t block);

// Checks the physical shape against the channel count; makes it contiguous.
// Raises ValueError, naming `op`, if they do not fit.
Blocked blocked_argument(const char* op, const at::Tensor& physical, std::int64_t channels);

// The same for an op that has kernels for float32 only; raises NotImplementedError for other types.
Blocked float_argument(const char* op, const at::Tensor& physical, std::int64_t channels);

// Uninitialised: whoever fills it leaves the tail zero.
Blocked empty_blocked(at::IntArrayRef dims, std::int64_t block, const at::TensorOptions& options);

// The descriptor of [N, C, *spatial] in nC*<block>c, kPlain or kChannelsLast.
dnnl::memory::desc activation_md(at::IntArrayRef dims, std::int64_t block, at::ScalarType dtype);

// [N, blocks, *spatial, lanes]: the physical shape in any of these formats.
Dims physical_dims(at::IntArrayRef dims, std::int64_t block);

// The descriptor of a strided tensor; empty if its elements overlap: oneDNN has no such.
dnnl::memory::desc strided_md(const at::Tensor& tensor);

// True if oneDNN has the type: f32 bf16 f16 s32 s8 u8.
bool has_onednn_type(at::ScalarType dtype);
dnnl::memory::data_type onednn_type(at::ScalarType dtype);

// "nChw16c" for a blocked activation; "nchw", "nhwc" or "strided" for a dense one. For people.
std::string blocked_name(std::int64_t ndims, std::int64_t block);
std::string strided_name(const at::Tensor& tensor);

// The tensor in the memory format nC*: contiguous, or channels-last if `channels_last`. 3-D
// channels-last (nwc) has no at::MemoryFormat, so strides say it.
at::Tensor empty_dense(at::IntArrayRef dims, bool channels_last, const at::TensorOptions& options);
// nw(d)(h)c strides of [N, C, *spatial].
Dims channels_last_strides(at::IntArrayRef dims);
bool is_channels_last(const at::Tensor& tensor);

}  // namespace torch_blocked
