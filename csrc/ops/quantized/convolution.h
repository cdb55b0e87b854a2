// Convolutions and linear layers of bytes. src and dst are unsigned, each with a scale and a zero
// point. Weights are signed, with a scale for each output channel. Sums of 32 bits are exact.
#pragma once

#include "kernels/dots/dots.h"
#include "ops/convolution/convolution.h"
#include "ops/products/row_chain.h"
#include "ops/quantized/quantization.h"

namespace torch_blocked {

struct QuantizedConvolutionProblem {
  // Sizes, with src and dst in blocked formats. The epilogue is applied to real numbers. dtype
  // and has_bias are ignored.
  ConvolutionProblem sizes;
  Quantization src;
  std::optional<Quantization> dst, residual;  // no dst: float32
};

// Packed weights, as bytes or words, and the kernels::DotChannels of each vector of channels.
struct QuantizedWeights {
  at::Tensor packed, channels;
};

struct QuantizedConvolutionPlan {
  // Names of the formats that pack() and channels() make.
  std::string weights_format, channels_format;
  // weight: int8, of the problem's dims. scales and bias: [OC] of float32; the bias may be
  // undefined.
  std::function<at::Tensor(const at::Tensor& weight)> pack;
  std::function<at::Tensor(const at::Tensor& weight, const at::Tensor& scales,
                           const at::Tensor& bias)>
      channels;
  std::function<void(const std::uint8_t* src, const QuantizedWeights& weights,
                     const std::uint8_t* residual, void* dst)>
      run;
  // How it runs a few rows at a time, and the function that does; nothing if it cannot.
  std::optional<RowStage> row_stage = {};
  std::function<RunRows(const QuantizedWeights& weights)> run_rows = {};
};

// run() consists of loops of share_units only, so threads may go through it together.
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

// A linear layer of bytes: rows [rows, inputs] by weight [outputs, inputs]. It runs as a
// convolution of one image whose pixels are the rows.
struct QuantizedLinearProblem {
  std::int64_t rows, inputs, outputs;
  Activation activation;
  Quantization src;
  std::optional<Quantization> dst;  // none: float32
};
using QuantizedLinearImplementations =
    Implementations<QuantizedLinearProblem, QuantizedConvolutionPlan>;
const QuantizedLinearImplementations& quantized_linear_implementations();

// The kernels::DotChannels of each vector of `width` channels, the name of their format, and the
// general end if there is one. weight: [OC, IC / groups, *taps].
std::string dot_channels_format(const QuantizedConvolutionProblem& problem);
at::Tensor dot_channels(const QuantizedConvolutionProblem& problem, const at::Tensor& weight,
                        const at::Tensor& scales, const at::Tensor& bias);
std::optional<kernels::DotEnd> dot_end(const QuantizedConvolutionProblem& problem);

// The format of src that implementations take. The few channels of a picture lie in one 32-bit
// group.
Format quantized_src_format(std::int64_t channels);

}  // namespace torch_blocked
