// A blocked activation as the ops see it: an ordinary dense tensor in physical shape, plus the
// logical channel count. The logical dims follow from these two.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <oneapi/dnnl/dnnl.hpp>
#include <string>
#include <vector>

#include "format/activation.h"
#include "format/sizes.h"

namespace torch_blocked {

struct Blocked {
  at::Tensor physical;    // [N, ceil(C / block), *spatial, block], contiguous
  std::int64_t channels;  // C

  std::int64_t ndims() const { return physical.dim() - 1; }
  std::int64_t block() const { return physical.size(-1); }
  Format format() const { return Format::blocked(block()); }
  std::int64_t blocks() const { return physical.size(1); }  // ceil(C / block)
  std::int64_t batch() const { return physical.size(0); }
  std::int64_t tail() const { return format().tail(channels); }  // lanes in use in the last block
  std::int64_t pixels() const;                                   // product of the spatial dims
  Dims dims() const;                                             // [N, C, *spatial]
  dnnl::memory::desc md() const;
};

// Raises unless an op may take a pointer to `tensor`: it must be an ordinary CPU tensor, its memory
// must hold all of its elements, and products of its sizes must fit 64 bits. TypeError for another
// kind of tensor, ValueError if the memory is gone or too small.
void check_memory(const char* op, const at::Tensor& tensor);

// Raises TypeError for a dtype that a plain tensor cannot have: a quantized one, or a number that
// is no dtype.
void check_dtype(const char* op, at::ScalarType dtype);

// Raises ValueError if no format has this block.
void check_block(const char* op, std::int64_t block);

// Checks the physical shape against the channel count; makes it contiguous.
// Raises ValueError, naming `op`, if they do not fit.
Blocked blocked_argument(const char* op, const at::Tensor& physical, std::int64_t channels);

// The same for an op with kernels for float32 only. Raises NotImplementedError for other types.
Blocked float_argument(const char* op, const at::Tensor& physical, std::int64_t channels);

// Whether results are checked for a zero tail: TORCH_BLOCKED_CHECK=1, as torch_blocked/dispatch.py
// reads it.
bool checks_tails();
// Raises RuntimeError unless the tail is zero. No handler mistakes that type for a wrong argument.
void check_tail(const char* op, const at::Tensor& physical, std::int64_t channels,
                const char* remedy);

// Uninitialised memory. The caller fills it and leaves the tail zero.
Blocked empty_blocked(at::IntArrayRef dims, std::int64_t block, const at::TensorOptions& options);

// The descriptor of [N, C, *spatial] in a format other than kStrided.
dnnl::memory::desc activation_md(at::IntArrayRef dims, Format format, at::ScalarType dtype);

// The descriptor of a strided tensor; empty if its elements overlap, which oneDNN cannot describe.
dnnl::memory::desc strided_md(const at::Tensor& tensor);

// True if oneDNN has the type: f32 bf16 f16 s32 s8 u8.
bool has_onednn_type(at::ScalarType dtype);
dnnl::memory::data_type onednn_type(at::ScalarType dtype);

// The format of a tensor that is not physical: kPlain, kChannelsLast or kStrided. It is kPlain if
// kPlain and kChannelsLast are the same memory.
Format format_of(const at::Tensor& tensor);

// An uninitialised dense tensor, contiguous or channels-last. It is made by strides, because 3-D
// channels-last (nwc) has no at::MemoryFormat.
at::Tensor empty_dense(at::IntArrayRef dims, bool channels_last, const at::TensorOptions& options);
// nw(d)(h)c strides of [N, C, *spatial].
Dims channels_last_strides(at::IntArrayRef dims);
bool is_channels_last(const at::Tensor& tensor);

}  // namespace torch_blocked
