// Linear layers by tiles of bfloat16 products: a row is a pixel, whose channels come last.
#include "ops/products/amx.h"

#include <memory>

#include "ops/linear/linear.h"
#include "runtime/memory/packed_place.h"
#include "runtime/trace/trace.h"

namespace torch_blocked {
namespace {

AmxProblem amx_problem(const LinearProblem& p) {
  constexpr std::array<std::int64_t, 3> kOnes{1, 1, 1}, kZeros{0, 0, 0};
  constexpr std::int64_t kWidth = kernels::Amx::kWidth;
  const std::array<std::int64_t, 3> rows{1, 1, p.rows};
  return {.images = 1,
          .ic = p.inputs,
          .oc = p.outputs,
          .sizes = {.in = rows,
                    .out = rows,
                    .kernel = kOnes,
                    .stride = kOnes,
                    .padding = kZeros,
                    .dilation = kOnes},
          .grid = {rows, kZeros, kOnes},
          .src = {p.inputs, kWidth, 0},
          .dst = {p.outputs, kWidth, 0},
          .has_tail = false,
          .epilogue = p.epilogue};
}

const char* refuses_amx(const LinearProblem& p) {
  if (!AmxProducts::available()) return "is for CPUs with AMX";
  if (p.dtype != at::kFloat) return "computes float32 only";
  return p.rows == 0 || p.inputs == 0 ? "takes no empty tensors" : nullptr;
}

double estimate_amx(const LinearProblem& p) { return AmxProducts::estimate(amx_problem(p)); }

std::optional<LinearPlan> plan_amx(const LinearProblem& p) {
  const auto products = std::make_shared<const AmxProducts>(amx_problem(p));
  LinearPlan plan{.weights_format = "amx",
                  .pack =
                      [products](const at::Tensor& weight) {
                        const at::Tensor packed =
                            empty_packed(products->packed_floats(), at::kFloat);
                        trace::Timed timed(trace::Kind::kPack, "linear",
                                           static_cast<std::int64_t>(weight.nbytes()));
                        products->pack(weight, packed.mutable_data_ptr<float>());
                        return packed;
                      },
                  .run = {}};
  plan.run = [products](const LinearBuffers& b) {
    products->run({.src = static_cast<const float*>(b.src),
                   .weights = static_cast<const float*>(b.weights),
                   .bias = static_cast<const float*>(b.bias),
                   .residual = static_cast<const float*>(b.residual),
                   .dst = static_cast<float*>(b.dst)});
  };
  plan.loops_only = true;
  return plan;
}

}  // namespace

constinit const LinearImplementation linears::amx = {
    .name = "amx",
    .refuses = refuses_amx,
    .plan = plan_amx,
    .estimate = estimate_amx,
    .traits = {.sums_in_place = true},
};

}  // namespace torch_blocked
