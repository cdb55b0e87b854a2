// The border between torch's dispatcher and the ops: every kernel that ops/registration.cpp
// registers is an Op. It checks the tensors before the function sees them and keeps autograd out of
// what the function calls. It also turns our exceptions and oneDNN's into the torch exceptions that
// Python sees as ValueError, TypeError, NotImplementedError and RuntimeError.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <new>
#include <oneapi/dnnl/dnnl.hpp>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "format/errors.h"
#include "ops/blocked.h"

namespace torch_blocked {

// An op's name as a template argument.
template <std::size_t size>
struct OpName {
  char text[size];
  constexpr OpName(const char (&name)[size]) { std::copy_n(name, size, text); }
};

// Checks every tensor and every dtype that an op is given; the function checks the rest itself.
template <typename T>
void check_argument(const char*, const T&) {}
inline void check_argument(const char* op, const at::Tensor& tensor) { check_memory(op, tensor); }
inline void check_argument(const char* op, const std::optional<at::ScalarType>& dtype) {
  if (dtype) check_dtype(op, *dtype);
}
inline void check_argument(const char* op, const std::optional<at::Tensor>& tensor) {
  if (tensor && tensor->defined()) check_memory(op, *tensor);
}
inline void check_argument(const char* op, const at::TensorList& tensors) {
  for (const at::Tensor& tensor : tensors) check_memory(op, tensor);
}

// Whether the memory does not hold the values themselves: conjugates or negatives taken lazily.
template <typename T>
bool is_lazy(const T&) {
  return false;
}
inline bool is_lazy(const at::Tensor& tensor) { return tensor.is_conj() || tensor.is_neg(); }
inline bool is_lazy(const std::optional<at::Tensor>& tensor) {
  return tensor && tensor->defined() && is_lazy(*tensor);
}
inline bool is_lazy(const at::TensorList& tensors) {
  return std::ranges::any_of(tensors, [](const at::Tensor& tensor) { return is_lazy(tensor); });
}

// The same argument with its values in memory.
template <typename T>
T& resolved(T& value) {
  return value;
}
inline at::Tensor resolved(const at::Tensor& tensor) { return tensor.resolve_conj().resolve_neg(); }
inline std::optional<at::Tensor> resolved(const std::optional<at::Tensor>& tensor) {
  return is_lazy(tensor) ? std::optional(resolved(*tensor)) : tensor;
}
inline std::vector<at::Tensor> resolved(at::TensorList tensors) {
  std::vector<at::Tensor> values;
  for (const at::Tensor& tensor : tensors) values.push_back(resolved(tensor));
  return values;
}

template <OpName name, auto function>
struct Op;

template <OpName name, typename Result, typename... Args, Result (*function)(Args...)>
struct Op<name, function> {
  static Result call(Args... args) {
    try {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      (check_argument(name.text, args), ...);
      // torch resolves lazy values before it calls a kernel, but not within __torch_dispatch__.
      if ((is_lazy(args) || ...)) [[unlikely]]
        return function(resolved(args)...);
      return function(std::forward<Args>(args)...);
    } catch (const ValueError& error) {
      TORCH_CHECK_VALUE(false, error.what());
    } catch (const TypeError& error) {
      TORCH_CHECK_TYPE(false, error.what());
    } catch (const NotImplementedError& error) {
      TORCH_CHECK_NOT_IMPLEMENTED(false, error.what());
    } catch (const dnnl::error& error) {
      TORCH_CHECK(false, error_sentence(name.text, "oneDNN to succeed", error.what(),
                                        "set ONEDNN_VERBOSE=all to see which primitive and why"));
    } catch (const std::bad_alloc&) {
      fail_memory();
    } catch (const std::length_error&) {
      fail_memory();
    }
  }

 private:
  [[noreturn]] static void fail_memory() {
    TORCH_CHECK(false, error_sentence(name.text, "memory for its work", "none from the system",
                                      "use smaller tensors"));
  }
};

// The kernel to register for `function`.
template <OpName name, auto function>
inline constexpr auto* kernel = &Op<name, function>::call;

}  // namespace torch_blocked
