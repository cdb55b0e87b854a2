// The functions behind torch.ops.torch_blocked.*, one line each; registration.cpp has the schemas.
// They take physical tensors and logical channel counts, and return physical tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

namespace torch_blocked {

// reorder.cpp
at::Tensor to_blocked(const at::Tensor& input, std::int64_t block,
                      std::optional<at::ScalarType> dtype);
at::Tensor to_dense(const at::Tensor& input, std::int64_t channels, bool channels_last,
                    std::optional<at::ScalarType> dtype);
at::Tensor reblock(const at::Tensor& input, std::int64_t channels, std::int64_t block,
                   std::optional<at::ScalarType> dtype);

// pointwise.cpp
at::Tensor empty_like(const at::Tensor& physical);
void clear_tail_(at::Tensor& physical, std::int64_t channels);
bool tail_is_zero(const at::Tensor& physical, std::int64_t channels);

// convolution.cpp
at::Tensor convolution(const at::Tensor& input, std::int64_t channels, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, std::int64_t groups);

// convolution_backward.cpp; gradients not asked for are empty
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // of input, weight and bias
Gradients convolution_backward(const at::Tensor& grad_output, const at::Tensor& input,
                               std::int64_t channels, const at::Tensor& weight,
                               at::IntArrayRef stride, at::IntArrayRef padding,
                               at::IntArrayRef dilation, bool transposed,
                               at::IntArrayRef output_padding, std::int64_t groups,
                               std::array<bool, 3> output_mask);

// batch_norm.cpp
at::Tensor batch_norm_inference(const at::Tensor& input, std::int64_t channels,
                                const std::optional<at::Tensor>& weight,
                                const std::optional<at::Tensor>& bias,
                                const at::Tensor& running_mean, const at::Tensor& running_var,
                                double eps);

// -> output, mean, 1 / sqrt(var + eps); writes the running statistics
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_training(
    const at::Tensor& input, std::int64_t channels, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& running_mean,
    const std::optional<at::Tensor>& running_var, double momentum, double eps);
Gradients batch_norm_backward(const at::Tensor& grad_output, const at::Tensor& input,
                              std::int64_t channels, const std::optional<at::Tensor>& weight,
                              const at::Tensor& mean, const at::Tensor& invstd, bool training,
                              std::array<bool, 3> output_mask);

// concat.cpp
at::Tensor concat_channels(at::TensorList inputs, at::IntArrayRef channels);
at::Tensor slice_channels(const at::Tensor& input, std::int64_t channels, std::int64_t start,
                          std::int64_t length);

// gather.cpp
at::Tensor pick_channels(const at::Tensor& input, std::int64_t channels, const at::Tensor& index);
at::Tensor place_channels(const at::Tensor& values, const at::Tensor& index, std::int64_t channels,
                          std::int64_t block);

// grid_sampler.cpp; gradients not asked for are empty
at::Tensor grid_sampler(const at::Tensor& input, std::int64_t channels, const at::Tensor& grid,
                        std::int64_t interpolation_mode, std::int64_t padding_mode,
                        bool align_corners);
std::tuple<at::Tensor, at::Tensor> grid_sampler_backward(
    const at::Tensor& grad_output, const at::Tensor& input, std::int64_t channels,
    const at::Tensor& grid, std::int64_t interpolation_mode, std::int64_t padding_mode,
    bool align_corners, std::array<bool, 2> output_mask);

// group_norm.cpp -> output, mean and 1 / sqrt(var + eps), [N, groups]
std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm(const at::Tensor& input,
                                                          std::int64_t channels,
                                                          const std::optional<at::Tensor>& weight,
                                                          const std::optional<at::Tensor>& bias,
                                                          std::int64_t groups, double eps);
Gradients group_norm_backward(const at::Tensor& grad_output, const at::Tensor& input,
                              std::int64_t channels, const at::Tensor& mean, const at::Tensor& rstd,
                              const std::optional<at::Tensor>& weight, std::int64_t groups,
                              std::array<bool, 3> output_mask);

// shuffle.cpp
at::Tensor gather_channels(const at::Tensor& input, std::int64_t channels, at::IntArrayRef index);
at::Tensor pixel_shuffle(const at::Tensor& input, std::int64_t channels, std::int64_t factor);
at::Tensor pixel_unshuffle(const at::Tensor& input, std::int64_t channels, std::int64_t factor);

// softmax.cpp
at::Tensor softmax(const at::Tensor& input, std::int64_t channels, std::int64_t dim, bool log);
at::Tensor softmax_backward(const at::Tensor& grad_output, const at::Tensor& output,
                            std::int64_t channels, std::int64_t dim, bool log);
at::Tensor sum_channels(const at::Tensor& input, std::int64_t channels);
at::Tensor argmax_channels(const at::Tensor& input, std::int64_t channels, bool least);

}  // namespace torch_blocked
