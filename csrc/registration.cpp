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
  // gather: the channel index[n, *pixel] of every pixel, and zeros but for it; -1 is none
  m.def("pick_channels(Tensor input, SymInt channels, Tensor index) -> Tensor");
  m.def("place_channels(Tensor values, Tensor index, SymInt channels, int block) -> Tensor");
  // grid_sampler: modes as in aten
  m.def(
      "grid_sampler(Tensor input, SymInt channels, Tensor grid, int interpolation_mode, "
      "int padding_mode, bool align_corners) -> Tensor");
  m.def(
      "grid_sampler_backward(Tensor grad_output, Tensor input, SymInt channels, Tensor grid, "
      "int interpolation_mode, int padding_mode, bool align_corners, bool[2] output_mask) -> "
      "(Tensor, Tensor)");
  // group_norm: output, mean and 1 / sqrt(var + eps) of every group, [N, groups]
  m.def(
      "group_norm(Tensor input, SymInt channels, Tensor? weight, Tensor? bias, SymInt groups, "
      "float eps) -> (Tensor, Tensor, Tensor)");
  m.def(
      "group_norm_backward(Tensor grad_output, Tensor input, SymInt channels, Tensor mean, "
      "Tensor rstd, Tensor? weight, SymInt groups, bool[3] output_mask) -> "
      "(Tensor, Tensor, Tensor)");
  // shuffle: channel i of the result is channel index[i] of input, zeros where it is -1
  m.def("gather_channels(Tensor input, SymInt channels, SymInt[] index) -> Tensor");
  m.def("pixel_shuffle(Tensor input, SymInt channels, SymInt factor) -> Tensor");
  m.def("pixel_unshuffle(Tensor input, SymInt channels, SymInt factor) -> Tensor");
  // softmax or its logarithm; the sum and the greatest or least channel of every pixel, dense
  m.def("softmax(Tensor input, SymInt channels, int dim, bool log) -> Tensor");
  m.def(
      "softmax_backward(Tensor grad_output, Tensor output, SymInt channels, int dim, bool log) -> "
      "Tensor");
  m.def("sum_channels(Tensor input, SymInt channels) -> Tensor");
  m.def("argmax_channels(Tensor input, SymInt channels, bool least) -> Tensor");
}

TORCH_LIBRARY_IMPL(torch_blocked, CPU, m) {
  m.impl("to_blocked", kernel<"to_blocked", &to_blocked>);
  m.impl("to_dense", kernel<"to_dense", &to_dense>);
  m.impl("reblock", kernel<"reblock", &reblock>);
  m.impl("empty_like", kernel<"empty_like", &empty_like>);
  m.impl("clear_tail_", kernel<"clear_tail_", &clear_tail_>);
  m.impl("tail_is_zero", kernel<"tail_is_zero", &tail_is_zero>);
  m.impl("convolution", kernel<"convolution", &convolution>);
  m.impl("convolution_backward", kernel<"convolution_backward", &convolution_backward>);
  m.impl("batch_norm_inference", kernel<"batch_norm_inference", &batch_norm_inference>);
  m.impl("batch_norm_training", kernel<"batch_norm_training", &batch_norm_training>);
  m.impl("batch_norm_backward", kernel<"batch_norm_backward", &batch_norm_backward>);
  m.impl("concat_channels", kernel<"concat_channels", &concat_channels>);
  m.impl("slice_channels", kernel<"slice_channels", &slice_channels>);
  m.impl("pick_channels", kernel<"pick_channels", &pick_channels>);
  m.impl("place_channels", kernel<"place_channels", &place_channels>);
  m.impl("grid_sampler", kernel<"grid_sampler", &grid_sampler>);
  m.impl("grid_sampler_backward", kernel<"grid_sampler_backward", &grid_sampler_backward>);
  m.impl("group_norm", kernel<"group_norm", &group_norm>);
  m.impl("group_norm_backward", kernel<"group_norm_backward", &group_norm_backward>);
  m.impl("gather_channels", kernel<"gather_channels", &gather_channels>);
  m.impl("pixel_shuffle", kernel<"pixel_shuffle", &pixel_shuffle>);
  m.impl("pixel_unshuffle", kernel<"pixel_unshuffle", &pixel_unshuffle>);
  m.impl("softmax", kernel<"softmax", &softmax>);
  m.impl("softmax_backward", kernel<"softmax_backward", &softmax_backward>);
  m.impl("sum_channels", kernel<"sum_channels", &sum_channels>);
  m.impl("argmax_channels", kernel<"argmax_channels", &argmax_channels>);
}

}  // namespace torch_blocked
