// A pool of memory for large tensors: it keeps the memory of tensors that die for new ones.
//
// malloc returns large blocks to the system when they are freed and gets them back page by page. A
// page fault costs 2 us on a virtual machine, or 0.6 ms a megabyte: a training step of resnet50 at
// batch 8 spent 8 % of its time on them. The block freed last is reused first, because it may still
// be in the caches.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torch_blocked {

// Like at::empty and at::empty_strided. Tensors below 1 MB come from ATen's own allocator.
at::Tensor empty_pooled(at::IntArrayRef sizes, const at::TensorOptions& options);
at::Tensor empty_pooled(at::IntArrayRef sizes, at::IntArrayRef strides,
                        const at::TensorOptions& options);

// Bytes in the pool that no tensor uses. Idle and used bytes together exceed the most bytes ever in
// use at the same time by at most a quarter.
std::int64_t idle_pool_bytes();

// Returns idle bytes to the system.
void release_pool();
// Also returns what ATen's allocator keeps: tuning and packing of ResNet-50 leave 150 MiB. Call it
// only when such work is over: new memory has to be cleared by the system first.
void return_idle_memory();

}  // namespace torch_blocked
