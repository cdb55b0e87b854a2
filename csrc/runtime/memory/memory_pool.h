// Memory of large tensors, kept when they die and given to the next ones.
//
// malloc gives large blocks back to the system when they are freed and gets them again page by
// page. A page fault costs 2 us on a virtual machine, 0.6 ms a megabyte: a training step of
// resnet50 at batch 8 spent 8 % of its time so. What died last is given first, as it may still be
// in the caches.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torch_blocked {

// As at::empty and at::empty_strided; tensors below 1 MB come from ATen's own allocator.
at::Tensor empty_pooled(at::IntArrayRef sizes, const at::TensorOptions& options);
at::Tensor empty_pooled(at::IntArrayRef sizes, at::IntArrayRef strides,
                        const at::TensorOptions& options);

// Bytes that no tensor uses. Idle and used bytes together never exceed by more than a quarter the
// most that were ever in use at the same time.
std::int64_t idle_pool_bytes();

// Gives them back to the system.
void release_pool();
// And what ATen's allocator keeps: tuning and packing of ResNet-50 leave 150 MiB. Who needs fresh
// memory soon waits until it is cleared, so this is for the end of such work.
void return_idle_memory();

}  // namespace torch_blocked
