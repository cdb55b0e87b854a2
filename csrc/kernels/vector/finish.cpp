#include "kernels/vector/finish.h"

#include <algorithm>

namespace torch_blocked::kernels::CPU_CAPABILITY {

void finish(const Epilogue& epilogue, const float* residual, float* dst, std::int64_t count) {
  with_finish(epilogue, residual, dst, [&](const auto& finish) {
    for (std::int64_t i = 0; i < count; i += kWidth) {
      const std::int64_t lanes = std::min(kWidth, count - i);
      store(finish(load(dst + i, lanes), dst + i, lanes), dst + i, lanes);
    }
  });
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
