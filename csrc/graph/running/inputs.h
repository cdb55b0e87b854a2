// Checks the inputs of a graph, before any of their memory is read.
#pragma once

#include "graph/graph.h"

namespace torch_blocked::graph {

// An input, dense in its format: kPlain, kChannelsLast or blocked.
struct Given {
  at::Tensor tensor;  // physical if the format is blocked
  Meta meta;          // with the logical dims
  Format format;
};
std::vector<Meta> metas_of(const std::vector<Given>& inputs);

// A tensor that is no Python subclass. Images of floats stay in channels-last; other strides become
// plain. With a dtype, floating-point numbers are converted to it. Raises TypeError for tensors
// without strided CPU memory of their own (sparse, quantized, meta, traced, batched, on other
// devices), and ValueError if the memory is smaller than the sizes say.
Given given(const at::Tensor& tensor, std::optional<at::ScalarType> dtype);

// A blocked tensor, which stays in its format. Raises ValueError if it is not blocked.
Given given_blocked(const at::Tensor& physical, std::int64_t channels,
                    std::optional<at::ScalarType> dtype);

// Raises ValueError if an input has another rank or type than `wanted`, or if there are more or
// fewer of them.
void check_inputs(const std::vector<Given>& inputs, const std::vector<Meta>& wanted);

// Sizes, types and formats in a few bytes. Inputs with the same key share a plan.
std::string key_of(const std::vector<Given>& inputs);

}  // namespace torch_blocked::graph
