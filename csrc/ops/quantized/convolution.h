// Convolutions of bytes: src and dst are unsigned, each with a scale and a zero point, the weights
// signed, with a scale for each output channel. Sums are exact, in 32 bits.
#pragma once

#include "kernels/dots/dots.h"
#include "ops/convolution/convolution.h"
#include "ops/products/row_chain.h"
#include "ops/quantized/quantization.h"

namespace torch_blocked {

struct QuantizedConvolutionProblem {
  // Sizes, with src and dst in blocked formats; the epilogue is applied to real numbers. dtype and
  // has_bias do not count.
  ConvolutionProblem sizes;
  Quantization src;
  std::optional<Quantization> dst, residual;  // no dst: float32
};

// Weights made ready: bytes, or words, and what becomes of the sums of each vector of channels.
struct QuantizedWeights {
  at::Tensor packed, channels;
};

struct QuantizedConvolutionPlan {
  // The names of what pack() and channels() make of the weights, with all else that decides it.
  std::string weights_format, channels_format;
  // weight int8, of the problem's dims; [OC] float32: its scales, and the bias, which may be
  // undefined.
  std::function<at::Tensor(const at::Tensor& weight)> pack;
  std::function<at::Tensor(const at::Tensor& weight, const at::Tensor& scales,
                           const at::Tensor& bias)>
      channels;
  std::function<void(const std::uint8_t* src, const QuantizedWeights& weights,
                     const std::uint8_t* residual, void* dst)>
      run;
  // How it runs for some rows at a time, and what does so; nothing where it does not.
  std::optional<RowStage> row_stage = {};
  std::function<RunRows(const QuantizedWeights& weights)> run_rows = {};
};

// All that run() does is in loops of share_units: threads may go through it together.
using QuantizedConvolution = Implementation<QuantizedConvolutionProblem, QuantizedConvolutionPlan>;
using QuantizedConvolutionImplementations =
    Implementations<QuantizedConvolutionProblem, QuantizedConvolutionPlan>;
const QuantizedConvolutionImplementations& quantized_convolution_implementations();

// The rows of the list; each is defined in the file of its kernel's name.
namespace quantized_convolutions {
#define IMPLEMENTATION(name) extern const QuantizedConvolution name;
#include "ops/quantized/list.inc"
#undef IMPLEMENTATION
}  // namespace quantized_convolutions

// Rows of bytes [rows, inputs] by weight [outputs, inputs]: a convolution of one image whose pixels
// are the rows.
struct QuantizedLinearProblem {
  std::int64_t rows, inputs, outputs;
  Activation activation;
  Quantization src;
  std::optional<Quantization> dst;  // none: float32
};
using QuantizedLinearImplementations =
    Implementations<QuantizedLinearProblem, QuantizedConvolutionPlan>;
const QuantizedLinearImplementations& quantized_linear_implementations();

// What becomes of the sums of each vector of `width` channels, as kernels::DotChannels, and its
// name; and of those of a general end. weight: [OC, IC / groups, *taps].
std::string dot_channels_format(const QuantizedConvolutionProblem& problem);
at::Tensor dot_channels(const QuantizedConvolutionProblem& problem, const at::Tensor& weight,
                        const at::Tensor& scales, const at::Tensor& bias);
std::optional<kernels::DotEnd> dot_end(const QuantizedConvolutionProblem& problem);

// The block of src that implementations take: four channels of a picture lie in one group.
Format quantized_src_format(std::int64_t channels);

}  // namespace torch_blocked
