// Linear layers of many rows by Strassen's product.
#include "ops/products/strassen.h"

#include <memory>

#include "ops/linear/linear.h"

namespace torch_blocked {
namespace {

const char* refuses_strassen(const LinearProblem& p) {
  if (!fewer_products_allowed()) return kFewerProductsRefused;
  if (p.dtype != at::kFloat) return "computes float32 only";
  const kernels::Kernels& kernels = kernels::kernels();
  if (p.inputs % kernels.width != 0 || p.outputs % kernels.width != 0) {
    return "takes whole vectors of inputs and outputs";
  }
  return Strassen::refuses(kernels, p.rows, p.inputs, p.outputs);
}

double estimate_strassen(const LinearProblem& p) {
  return linears::direct.estimate(p) *
         Strassen::share(kernels::kernels().width, p.inputs, p.outputs);
}

std::optional<LinearPlan> plan_strassen(const LinearProblem& p) {
  const kernels::Kernels& kernels = kernels::kernels();
  const auto strassen = std::make_shared<const Strassen>(kernels, 1, p.rows, p.inputs, p.outputs);
  LinearPlan plan{
      .weights_format = "linear by strassen",
      .pack = [strassen](const at::Tensor& weight) { return strassen->pack(weight.contiguous()); },
      .run = {}};
  const VectorSteps src_steps{.row = p.inputs, .vector = kernels.width, .image = 0};
  const VectorSteps dst_steps{.row = p.outputs, .vector = kernels.width, .image = 0};
  plan.run = [strassen, src_steps, dst_steps, epilogue = p.epilogue](const LinearBuffers& b) {
    strassen->run(src_steps, dst_steps, epilogue,
                  {static_cast<const float*>(b.src), static_cast<const float*>(b.weights),
                   static_cast<const float*>(b.bias), static_cast<const float*>(b.residual),
                   static_cast<float*>(b.dst)});
  };
  plan.loops_only = true;
  plan.handicap = Strassen::kHandicap;
  return plan;
}

}  // namespace

constinit const LinearImplementation linears::strassen = {
    .name = "strassen",
    .refuses = refuses_strassen,
    .plan = plan_strassen,
    .estimate = estimate_strassen,
    .traits = {.sums_in_place = true, .only_measured = true},
};

}  // namespace torch_blocked
