// Every schema and every kernel of torch.ops.torch_blocked; nothing else registers.
//
// `input` is a physical tensor [N, ceil(C/b), *spatial, b] and `channels` its logical C; what comes
// back is physical too, except from to_dense. No op returns an alias of its input.
// Shapes for tracing (fake kernels) are in torch_blocked/ops/<family>.py.
#include <torch/library.h>

#include "ops/registered.h"
#include "ops/torch_errors.h"

namespace torch_blocked {

TORCH_LIBRARY(torch_blocked, m) {
  // reorder
  m.def("to_blocked(Tensor input, int block, *, ScalarType? dtype=None) -> Tensor");
  m.def(
      "to_dense(Tensor input, SymInt channels, *, bool channels_last=False, ScalarType? "
      "dtype=None) -> Tensor");
  m.def("reblock(Tensor input, SymInt channels, int block, *, ScalarType? dtype=None) -> Tensor");
  // pointwise: uninitialised memory for a result; the zero tail; (a!) is written in place
  m.def("empty_like(Tensor input) -> Tensor");
  m.def("clear_tail_(Tensor(a!) input, SymInt channels) -> ()");
  m.def("tail_is_zero(Tensor input, SymInt channels) -> bool");
  // convolution, also transposed; weight and bias are dense
  m.def(
      "convolution(Tensor input, SymInt channels, Tensor weight, Tensor? bias, SymInt[] stride, "
      "SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, "
      "SymInt groups) -> Tensor");
  // gradients of input, weight and bias; empty where the mask says no
  m.def(
      "convolution_backward(Tensor grad_output, Tensor input, SymInt channels, Tensor weight, "
      "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, "
      "SymInt[] output_padding, SymInt groups, bool[3] output_mask) -> (Tensor, Tensor, Tensor)");
  // batch_norm
  m.def(
      "batch_norm_inference(Tensor input, SymInt channels, Tensor? weight, Tensor? bias, "
      "Tensor running_mean, Tensor running_var, float eps) -> Tensor");
  // output, mean and 1 / sqrt(var + eps) of the batch; writes the running statistics
  m.def(
      "batch_norm_training(Tensor input, SymInt channels, Tensor? weight, Tensor? bias, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, float momentum, float eps) -> "
      "(Tensor, Tensor, Tensor)");
  // mean and invstd are those of the batch in training, the running ones otherwise
  m.def(
      "batch_norm_backward(Tensor grad_output, Tensor input, SymInt channels, Tensor? weight, "
      "Tensor mean, Tensor invstd, bool training, bool[3] output_mask) -> "
      "(Tensor, Tensor, Tensor)");
  // concat
  m.def("concat_channels(Tensor[] inputs, SymInt[] channels) -> Tensor");
  m.def("slice_channels(Tensor input, SymInt channels, SymInt start, SymInt length) -> Tensor");
}

TORCH_LIBRARY_IMPL(torch_blocked, CPU, m) {
  m.impl("to_blocked", kernel<&to_blocked>);
  m.impl("to_dense", kernel<&to_dense>);
  m.impl("reblock", kernel<&reblock>);
  m.impl("empty_like", kernel<&empty_like>);
  m.impl("clear_tail_", kernel<&clear_tail_>);
  m.impl("tail_is_zero", kernel<&tail_is_zero>);
  m.impl("convolution", kernel<&convolution>);
  m.impl("convolution_backward", kernel<&convolution_backward>);
  m.impl("batch_norm_inference", kernel<&batch_norm_inference>);
  m.impl("batch_norm_training", kernel<&batch_norm_training>);
  m.impl("batch_norm_backward", kernel<&batch_norm_backward>);
  m.impl("concat_channels", kernel<&concat_channels>);
  m.impl("slice_channels", kernel<&slice_channels>);
}

}  // namespace torch_blocked
