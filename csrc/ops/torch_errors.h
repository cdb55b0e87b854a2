// Our exceptions and oneDNN's as the torch ones that Python sees as ValueError, TypeError,
// NotImplementedError and RuntimeError. Ops throw ours; only the registration crosses the border.
#pragma once

#include <c10/util/Exception.h>

#include <oneapi/dnnl/dnnl.hpp>

#include "format/errors.h"

namespace torch_blocked {

template <auto function>
struct Translated;

template <typename Result, typename... Args, Result (*function)(Args...)>
struct Translated<function> {
  static Result call(Args... args) {
    try {
      return function(std::forward<Args>(args)...);
    } catch (const ValueError& error) {
      TORCH_CHECK_VALUE(false, error.what());
    } catch (const TypeError& error) {
      TORCH_CHECK_TYPE(false, error.what());
    } catch (const NotImplementedError& error) {
      TORCH_CHECK_NOT_IMPLEMENTED(false, error.what());
    } catch (const dnnl::error& error) {
      TORCH_CHECK(false, error_sentence("oneDNN", "success", error.what(),
                                        "set ONEDNN_VERBOSE=all to see which primitive and why"));
    }
  }
};

// The kernel to register for `function`.
template <auto function>
inline constexpr auto* kernel = &Translated<function>::call;

}  // namespace torch_blocked
