#include "kernels/finish.h"

#include <algorithm>

namespace torch_blocked::kernels::CPU_CAPABILITY {

void finish(const Epilogue& epilogue, const float* residual, float* dst, std::int64_t count) {
  const Finish finish(epilogue, residual, dst);
  for (std::int64_t i = 0; i < count; i += kWidth, dst += kWidth) {
    const std::int64_t lanes = std::min(kWidth, count - i);
    store(finish(load(dst, lanes), dst, lanes), dst, lanes);
  }
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
