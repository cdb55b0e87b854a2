// Layers with weights that other kinds of nodes look at or fuse with. Each node reads src as its
// first value, and the residual of a sum, if there is one, as its second.
#pragma once

#include "graph/nodes/boxed.h"
#include "graph/nodes/stored_program.h"
#include "graph/passes/rules.h"
#include "ops/convolution/convolution.h"
#include "ops/linear/linear.h"

namespace torch_blocked::graph {

// Parameters are dense, with batch norm folded in; bias may be undefined.
struct Convolution {
  Weight weight;
  at::Tensor bias;
  Dims stride, padding, dilation, output_padding;
  Dims padding_end;  // more zeros at the far end than `padding` has; empty: none
  bool transposed;
  std::int64_t groups;
  Epilogue epilogue = {};
  std::optional<StoredProgram> stored = {};  // what comes after the epilogue
};

struct Linear {
  Weight weight;           // [O, I]
  at::Tensor bias;         // [O], or undefined
  Epilogue epilogue = {};  // with a sum, only an activation after it
};

// linear.cpp: the layer on images of `rank` dims, as a 1x1 convolution.
Convolution as_convolution(const Linear& linear, std::size_t rank);

struct Affine {
  at::Tensor scale, shift;  // [C]
  Activation activation = {};
};

// scaling.cpp: the scale and shift of a batch norm of constants, in float64; nothing for other
// nodes.
std::optional<Affine> batch_norm_of(const Rewrite& rewrite, const Node& node);

// Zeros in front of an image, and how many more there are behind it.
struct Padding {
  Dims begin, more;  // more: empty for none
};
// A convolution's padding, given as numbers or as a word; nothing if our kernels do not take it.
std::optional<Padding> padding_of(const Node& node, const ConvolutionOp& op, at::IntArrayRef kernel,
                                  const Dims& stride, const Dims& dilation);

// layers/padding.cpp: fuses padding into the convolutions behind it, and removes taps that read
// only padding.
void simplify_padding(Rewrite& rewrite);

// Whether a bias, if there is one, is a vector of a weight's type and outputs.
inline bool bias_fits(const at::Tensor* bias, at::ScalarType dtype, std::int64_t outputs) {
  return !bias || (bias->scalar_type() == dtype && bias->dim() == 1 && bias->size(0) == outputs);
}

// The problem of a layer with the fields of Convolution, for a src of these dims, in plain formats.
// Padding at the far ends counts for the sizes of dst, but src stays as it is.
template <typename Layer>
ConvolutionProblem layer_problem(const Layer& layer, const at::Tensor& weight,
                                 const at::Tensor& bias, const Dims& src_dims) {
  Dims padded = src_dims;
  for (std::size_t i = 0; i < layer.padding_end.size(); ++i) padded[2 + i] += layer.padding_end[i];
  ConvolutionProblem problem =
      convolution_problem(padded, kPlain, weight, bias, layer.stride, layer.padding, layer.dilation,
                          layer.transposed, layer.output_padding, layer.groups);
  problem.src_dims = src_dims;
  problem.epilogue = layer.epilogue;
  return problem;
}

}  // namespace torch_blocked::graph
