// Our SIMD kernels: raw pointers and sizes, no tensors, no threads. Each source here is compiled
// once per instruction set, into the namespace of that set. kernels() gives the table of the set in
// use. list.inc has a row for every kernel; its arguments are in the header of its family.
//
// A kernel works on the range [begin, end) of its outermost unit, so that the caller can share the
// work among threads. `block` is the channel block b; lanes are the b channels of one pixel.
#pragma once

#include <cstdint>

namespace torch_blocked::kernels {

#define ARGUMENTS(type) struct type;
#include "kernels/list.inc"

struct Kernels {
#define KERNEL(result, name, arguments) result(*name) arguments;
#define CONSTANT(type, name) const type* name;
#include "kernels/list.inc"
  std::int64_t width;  // floats of a vector
};

// The table of the instruction set in use (runtime/isa.h).
const Kernels& kernels();

// The same, or the table of a lesser set if this one has vectors wider than the block. Half-filled
// AVX-512 vectors move 8c at a third of the speed of AVX2's.
const Kernels& kernels_for(std::int64_t block);

}  // namespace torch_blocked::kernels
