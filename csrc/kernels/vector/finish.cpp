#include "kernels/vector/finish.h"

#include <algorithm>

#include "kernels/vector/short_lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

template <typename Number>
void finish_all(const Epilogue& epilogue, const Number* residual, Number* dst, std::int64_t count) {
  with_finish<Number>(epilogue, residual, dst, [&](const auto& finish) {
    for (std::int64_t i = 0; i < count; i += kWidth) {
      const std::int64_t lanes = std::min(kWidth, count - i);
      store(finish(load(dst + i, lanes), dst + i, lanes), dst + i, lanes);
    }
  });
}

}  // namespace

void finish(const Epilogue& epilogue, const float* residual, float* dst, std::int64_t count) {
  finish_all(epilogue, residual, dst, count);
}

void finish_bfloats(const Epilogue& epilogue, const std::uint16_t* residual, std::uint16_t* dst,
                    std::int64_t count) {
  finish_all(epilogue, residual, dst, count);
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
