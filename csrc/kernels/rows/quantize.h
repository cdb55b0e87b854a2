// Arguments of the kernels that convert between numbers and bytes.
#pragma once

namespace torch_blocked::kernels {

// byte = clamp(nearest(x * inverse_scale) + zero, least, most), ties to even; x = (byte - zero) *
// scale. These are the float32 operations of torch.ops.quantized_decomposed, one by one.
struct Quantizer {
  float scale, inverse_scale, zero, least, most;
};

}  // namespace torch_blocked::kernels
