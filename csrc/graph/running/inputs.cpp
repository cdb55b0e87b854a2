// Checks the inputs of a call, brings them into formats that plans take, and makes the key by which
// their plan is found.
#include "graph/running/inputs.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include "format/errors.h"
#include "ops/blocked.h"
#include "ops/moving/reorder.h"
#include "runtime/onednn/primitive.h"

namespace torch_blocked::graph {
namespace {

// Describes a tensor that is not strided numbers in the CPU's memory; null for all others.
const char* oddity(const at::Tensor& tensor) {
  using c10::DispatchKey;
  if (!tensor.defined()) return "no tensor";
  const c10::DispatchKeySet keys = tensor.key_set();
  if (keys.has(DispatchKey::Functionalize)) return "a functionalized tensor";
  if (keys.has(DispatchKey::FuncTorchBatched)) return "a tensor that torch.vmap batches";
  if (keys.has(DispatchKey::FuncTorchGradWrapper)) return "a tensor inside torch.func.grad";
  if (keys.has(DispatchKey::Python)) return "a tensor of a Python subclass";
  if (tensor.is_meta()) return "a meta tensor";
  if (!tensor.device().is_cpu()) return "a tensor of another device";
  if (tensor.is_quantized()) return "a quantized tensor";
  if (tensor.is_nested()) return "a nested tensor";
  if (tensor.layout() != at::kStrided) return "a tensor of another layout";
  if (!tensor.has_storage()) return "a tensor without memory";
  return nullptr;
}

void check_plain(const at::Tensor& tensor) {
  if (const char* what = oddity(tensor)) {
    fail_type("optimize", "dense or blocked CPU tensors as inputs", what,
              "convert it (to_dense(), dequantize(), cpu()), or call the model itself");
  }
  check_memory("optimize", tensor);
}

bool is_image(const at::Tensor& tensor) {
  return tensor.dim() >= 3 && tensor.dim() <= 5 &&
         (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16);
}

at::Tensor converted(const at::Tensor& tensor, std::optional<at::ScalarType> dtype) {
  return dtype && tensor.is_floating_point() ? tensor.to(*dtype) : tensor;
}

}  // namespace

std::vector<Meta> metas_of(const std::vector<Given>& inputs) {
  std::vector<Meta> metas;
  for (const Given& input : inputs) metas.push_back(input.meta);
  return metas;
}

Given given(const at::Tensor& tensor, std::optional<at::ScalarType> dtype) {
  check_plain(tensor);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor input = converted(tensor.resolve_conj().resolve_neg(), dtype);
  const Meta meta{input.sizes().vec(), input.scalar_type()};
  if (is_image(input) && format_of(input) == kChannelsLast) return {input, meta, kChannelsLast};
  return {input.contiguous(), meta, kPlain};
}

Given given_blocked(const at::Tensor& physical, std::int64_t channels,
                    std::optional<at::ScalarType> dtype) {
  check_plain(physical);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Blocked blocked = blocked_argument("optimize", converted(physical, dtype), channels);
  const Meta meta{blocked.dims(), blocked.physical.scalar_type()};
  if (is_image(blocked.physical.select(-1, 0))) return {blocked.physical, meta, blocked.format()};
  return {reorder_to_dense("optimize", blocked, false), meta, kPlain};
}

void check_inputs(const std::vector<Given>& inputs, const std::vector<Meta>& wanted) {
  if (inputs.size() != wanted.size()) {
    fail_value("optimize", text(wanted.size(), " tensors as inputs"), text(inputs.size()),
               "call it with arguments like the example inputs");
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Meta& got = inputs[i].meta;
    if (got.dtype == wanted[i].dtype && got.dims.size() == wanted[i].dims.size()) continue;
    fail_value("optimize",
               text("an input of type ", wanted[i].dtype, " and ", wanted[i].dims.size(), " dims"),
               text(got.dtype, " and ", got.dims),
               "call it with arguments like the example inputs");
  }
}

std::string key_of(const std::vector<Given>& inputs) {
  Key key("plan");
  for (const Given& input : inputs) {
    key.add(input.meta.dims).add(static_cast<std::int64_t>(input.meta.dtype)).add(input.format);
  }
  return std::move(key).finish();
}

}  // namespace torch_blocked::graph
