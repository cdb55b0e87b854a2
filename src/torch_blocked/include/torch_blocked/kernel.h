// What a kernel of another library needs besides its arithmetic: to check its arguments, make its
// result, share blocks among threads, and register itself and its blocked form with torch.
#pragma once

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "torch_blocked/blocked_form.h"
#include "torch_blocked/tensor.h"

namespace torch_blocked {

// A block of channels of one image: what is read, and what is written. Element i of both is lane i
// % lanes of pixel i / lanes. Lane l is channel first_channel + l, or part of the zero tail.
template <typename T>
struct Block {
  const T* src;
  T* dst;
  std::int64_t pixels, lanes, first_channel;
};

// Returns a new physical tensor like `physical`, [N, ceil(C / b), *spatial, b] of T. Calls
// body(Block<T>) once for each block, on torch's threads. The body must write all of dst, with 0 in
// the zero tail. Python sees ValueError for tensors that accessor() refuses.
template <typename T, typename Body>
at::Tensor map_blocks(const at::Tensor& physical, std::int64_t channels, Body&& body) {
  const auto src = accessor<const T>(physical, channels);
  at::Tensor result = at::empty_like(physical);
  const auto dst = accessor<T>(result, channels);
  for_blocks(src, [&](std::int64_t n, std::int64_t i) {
    body(Block<T>{src.block(n, i), dst.block(n, i), src.pixels(), src.lanes(), i * src.lanes()});
  });
  return result;
}

// The values of a vector [C] of T, one per channel, followed by enough zeros for the zero tail of
// any block. Python sees ValueError for any other tensor.
template <typename T>
std::vector<T> per_channel(const at::Tensor& vector, std::int64_t channels) {
  TORCH_CHECK_VALUE(
      vector.defined() && vector.is_cpu() && vector.dim() == 1 && vector.size(0) == channels &&
          vector.scalar_type() == c10::CppTypeToScalarType<T>::value,
      "torch_blocked::per_channel: expected a CPU tensor [", channels, "] of ",
      c10::CppTypeToScalarType<T>::value, ", got ", vector.toString(), " ",
      vector.defined() ? vector.sizes() : at::IntArrayRef(), "; give a value for each channel");
  const at::Tensor dense = vector.contiguous();
  std::vector<T> values(static_cast<std::size_t>(channels + kMostLanes), T{});
  std::copy_n(dense.const_data_ptr<T>(), channels, values.begin());
  return values;
}

// The fake kernel of an op whose result has the dims and the type of its first argument.
inline void like_first_argument(const c10::OperatorHandle& op, c10::Stack* stack) {
  const std::size_t arguments = op.schema().arguments().size();
  at::Tensor result = at::empty_like(torch::jit::peek(*stack, 0, arguments).toTensor());
  torch::jit::drop(*stack, arguments);
  torch::jit::push(*stack, std::move(result));
}

// For use in TORCH_LIBRARY(my, m). Defines the op of `schema`, such as "swish(Tensor x, float beta)
// -> Tensor", with its CPU kernel. Also defines its blocked form (blocked_form.h),
// my::swish_blocked, which has `SymInt channels` after the first argument. Both get
// like_first_argument as their fake kernel; define ops with other results by torch's own means and
// register_blocked_form. Kernels are TORCH_FN(f).
template <typename Kernel, typename BlockedKernel>
void define_op(torch::Library& library, const std::string& schema, Kernel kernel,
               BlockedKernel blocked_kernel) {
  const auto define = [&](const std::string& name, const std::string& signature, auto function) {
    library.def((name + signature).c_str());
    library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CPU, function));
    library.impl(
        name.c_str(),
        torch::dispatch(c10::DispatchKey::Meta,
                        torch::CppFunction::makeFromBoxedFunction<&like_first_argument>()));
    return c10::toString(library._resolve(name.c_str()));
  };
  const std::size_t open = schema.find('(');
  const std::string name = schema.substr(0, open), signature = schema.substr(open);
  std::string form = signature;
  form.insert(form.find_first_of(",)"), ", SymInt channels");
  const std::size_t overload = name.find('.');
  const std::string form_name =
      name.substr(0, overload) + "_blocked" + (overload == name.npos ? "" : name.substr(overload));
  register_blocked_form(define(name, signature, kernel), define(form_name, form, blocked_kernel));
}

}  // namespace torch_blocked
