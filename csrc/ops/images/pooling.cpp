// Pooling as a list of implementations: maxima by our kernels, averages by oneDNN where it divides
// as ATen does, else by our kernels.
#include "ops/images/pooling.h"

#include <array>
#include <memory>

#include "format/errors.h"
#include "kernels/images/pooling.h"
#include "kernels/kernels.h"
#include "ops/moving/reorder.h"
#include "ops/window.h"
#include "runtime/fork.h"
#include "runtime/onednn/engine.h"
#include "runtime/onednn/primitive.h"
#include "runtime/trace/trace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

// Whether every window has a pixel of src. A dilated window far in the padding may have none.
bool all_windows_have_pixels(const PoolingProblem& p) {
  for (std::size_t i = 0; i < p.kernel.size(); ++i) {
    const std::int64_t src = p.src_dims[2 + i];
    for (std::int64_t at = 0; at < p.dst_dims[2 + i]; ++at) {
      std::int64_t tap = at * p.stride[i] - p.padding[i], left = p.kernel[i];
      for (; left > 0 && tap < 0; --left) tap += p.dilation[i];
      if (left == 0 || tap >= src) return false;
    }
  }
  return true;
}

// Plans kernel(of_memory(windows of src and dst), rows) for all rows of dst.
template <typename Kernel, typename OfMemory>
PoolingPlan plan_rows(const PoolingProblem& p, Kernel kernel, OfMemory of_memory) {
  const kernels::PoolingWindows windows = windows_of(p);
  const std::int64_t blocks = p.format.is_blocked() ? p.format.blocks(p.src_dims[1]) : 1;
  const std::int64_t rows = p.src_dims[0] * blocks * windows.out[0] * windows.out[1];
  const std::int64_t taps = c10::multiply_integers(p.kernel);
  const auto run = [windows, rows, kernel, of_memory, cost = windows.out[2] * windows.lanes * taps](
                       const void* src, void* dst) {
    kernels::PoolingWindows of_tensors = windows;
    of_tensors.src = src;
    of_tensors.dst = dst;
    const auto argument = of_memory(of_tensors);
    parallel_units(rows, cost,
                   [&](std::int64_t begin, std::int64_t end) { kernel(argument, begin, end); });
  };
  return {.run = run, .loops_only = true};
}

const kernels::Kernels& kernels_of(const PoolingProblem& p) {
  return p.format.is_blocked() ? kernels::kernels_for(p.format.block) : kernels::kernels();
}

// Never by oneDNN, which ignores a NaN in a window.
std::optional<PoolingPlan> plan_maximum(const PoolingProblem& p) {
  const kernels::Kernels& k = kernels_of(p);
  const auto kernel = p.dtype == at::kByte       ? k.maximum_bytes
                      : p.dtype == at::kBFloat16 ? k.maximum_bfloats
                                                 : k.maximum;
  return plan_rows(p, kernel, [](const kernels::PoolingWindows& windows) { return windows; });
}

// Takes the averages that oneDNN does not. With small windows it takes up to 1.5 times as long as
// oneDNN's kernel.
std::optional<PoolingPlan> plan_average(const PoolingProblem& p) {
  return plan_rows(p, kernels_of(p).average,
                   [of_window = p.kind == Pooling::kAverageOfWindow,
                    divisor = p.divisor](const kernels::PoolingWindows& windows) {
                     return kernels::Averages{
                         .windows = windows, .divisor = divisor, .of_window = of_window};
                   });
}

// Whether oneDNN divides as ATen does: there is no other divisor, and ceil_mode adds no windows
// that go beyond the padding.
bool divides_by_windows(const PoolingProblem& p) {
  if (p.divisor != 0) return false;
  for (std::size_t i = 0; p.kind == Pooling::kAverageOfWindow && i < p.kernel.size(); ++i) {
    const Window window{p.kernel[i], p.stride[i], p.padding[i], p.dilation[i]};
    if (window.padding_end(p.src_dims[2 + i], p.dst_dims[2 + i]) > p.padding[i]) return false;
  }
  return true;
}

std::optional<PoolingPlan> plan_onednn(const PoolingProblem& p) {
  const dnnl::algorithm algorithm = p.kind == Pooling::kAverageOfWindow
                                        ? dnnl::algorithm::pooling_avg_include_padding
                                        : dnnl::algorithm::pooling_avg_exclude_padding;
  const dnnl::memory::desc src_md = activation_md(p.src_dims, p.format, p.dtype),
                           dst_md = activation_md(p.dst_dims, p.format, p.dtype);
  Dims dilates = p.dilation;  // oneDNN counts the gaps
  for (std::int64_t& dilate : dilates) --dilate;
  Dims padding_end = p.padding;  // dst may end before the far padding, or beyond it with ceil_mode
  for (std::size_t i = 0; i < p.kernel.size(); ++i) {
    const Window window{p.kernel[i], p.stride[i], p.padding[i], p.dilation[i]};
    padding_end[i] = window.padding_end(p.src_dims[2 + i], p.dst_dims[2 + i]);
  }
  const NoFork no_fork;
  const dnnl::pooling_forward::primitive_desc pd(engine(), dnnl::prop_kind::forward_inference,
                                                 algorithm, src_md, dst_md, p.stride, p.kernel,
                                                 dilates, p.padding, padding_end, user_scratchpad(),
                                                 /*allow_empty=*/true);
  if (!pd) return std::nullopt;
  if (is_ref(pd.impl_info_str())) {
    trace::record({trace::Kind::kRef, "pooling", pd.impl_info_str()});
    return std::nullopt;
  }
  const std::array<Primitive::Argument, 2> arguments{
      {{DNNL_ARG_SRC, src_md}, {DNNL_ARG_DST, dst_md}}};
  const auto primitive =
      std::make_shared<Primitive>(dnnl::pooling_forward(pd), arguments, pd.scratchpad_desc());
  return PoolingPlan{
      .run = [primitive](const void* src, void* dst) { primitive->execute({src, dst}); }};
}

const char* refuses_maximum(const PoolingProblem& p) {
  if (p.kind != Pooling::kMax) return "is for maxima";
  return all_windows_have_pixels(p) ? nullptr : "takes no windows beyond the input";
}

const char* refuses_average(const PoolingProblem& p) {
  if (p.kind == Pooling::kMax) return "is for averages";
  return p.dtype == at::kFloat ? nullptr : "is for float32";
}

const char* refuses_onednn(const PoolingProblem& p) {
  if (p.kind == Pooling::kMax) return "is for averages";
  if (p.dtype == at::kByte) return "takes no bytes";
  return divides_by_windows(p) ? nullptr : "divides by the window's size only";
}

// In order of preference.
const Implementations<PoolingProblem, PoolingPlan> kPoolingImplementations(
    "pooling", {{.name = "maximum", .refuses = refuses_maximum, .plan = plan_maximum},
                {.name = "onednn",
                 .refuses = refuses_onednn,
                 .plan = plan_onednn,
                 .fails = "has only a `ref` kernel for it, or none"},
                {.name = "average", .refuses = refuses_average, .plan = plan_average}});

}  // namespace

kernels::PoolingWindows windows_of(const PoolingProblem& p) {
  return {.src = nullptr,
          .dst = nullptr,
          .lanes = p.format.is_blocked() ? p.format.block : p.src_dims[1],
          .in = as_3d(at::IntArrayRef(p.src_dims).slice(2), 1),
          .out = as_3d(at::IntArrayRef(p.dst_dims).slice(2), 1),
          .kernel = as_3d(p.kernel, 1),
          .stride = as_3d(p.stride, 1),
          .padding = as_3d(p.padding, 0),
          .dilation = as_3d(p.dilation, 1)};
}

const char* choose_pooling(const PoolingProblem& p) {
  const auto named = kPoolingImplementations.choose(p, kPoolingImplementations.forced(), [&] {
    return text("a window ", p.kernel, " on ", p.src_dims);
  });
  return named ? named->name : nullptr;
}

PoolingPlan plan_pooling(const PoolingProblem& p, const char* implementation) {
  kPoolingImplementations.set_last(implementation);
  return kPoolingImplementations.plan(kPoolingImplementations.row(implementation), p).value();
}

std::vector<Refusal> pooling_refusals(const PoolingProblem& p) {
  return kPoolingImplementations.refusals(p);
}

}  // namespace torch_blocked
