// What a graph is called with: checked in one place, before any memory of it is read.
#pragma once

#include "graph/graph.h"

namespace torch_blocked::graph {

// Not a format to choose: plain dims with any strides, as ATen makes them and as constants are. Who
// reads raw memory wants kPlain instead, and the planner puts a step in between.
inline constexpr std::int64_t kStrided = -1;

// An input, dense in its format: kPlain, kChannelsLast or a block.
struct Given {
  at::Tensor tensor;  // physical if the format is a block
  Dims dims;          // logical
  std::int64_t format = kPlain;

  Meta meta() const { return {dims, tensor.scalar_type()}; }
};
std::vector<Meta> metas_of(const std::vector<Given>& inputs);

// A tensor of no Python subclass. Images of floats stay in channels-last, other strides become
// plain. With a dtype, floating-point numbers are converted to it.
// Raises TypeError for what has no strided CPU memory of its own: sparse, quantized, meta, traced
// or batched tensors, those of other devices; ValueError if the memory is smaller than the sizes
// say.
Given given(const at::Tensor& tensor, std::optional<at::ScalarType> dtype);

// A blocked tensor, which stays in its format. Raises ValueError if it is none.
Given given_blocked(const at::Tensor& physical, std::int64_t channels,
                    std::optional<at::ScalarType> dtype);

// Raises ValueError if an input has another rank or type than `wanted`, or if there are more or
// less of them.
void check_inputs(const std::vector<Given>& inputs, const std::vector<Meta>& wanted);

// Sizes, types and formats in a few bytes: the same for inputs that one plan serves.
std::string key_of(const std::vector<Given>& inputs);

}  // namespace torch_blocked::graph
