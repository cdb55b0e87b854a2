// Observes ops through PyTorch's dispatcher and reports them to trace, with their module, formats
// and products.
#include "runtime/trace/observer.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <mutex>
#include <ranges>
#include <span>
#include <string_view>

#include "format/activation.h"
#include "format/errors.h"
#include "runtime/fork.h"
#include "runtime/onednn/verbose_stream.h"
#include "runtime/trace/trace.h"
#include "torch_blocked/tag.h"

namespace torch_blocked {
namespace {

using c10::IValue;
using Values = std::span<const IValue>;

// ---- which module a node of autograd is of ------------------------------------------------------

// Within a thread, an op of the forward has the same sequence number as its autograd node.
using SequenceKey = std::pair<std::uint64_t, std::int64_t>;
std::map<SequenceKey, std::string> modules;
ForkMutex modules_mutex([] { abandon(modules); });

void note_module(const at::RecordFunction& function) {
  const trace::Event* around = trace::innermost();
  if (function.seqNr() < 0 || !around || around->is_backward) return;
  const std::lock_guard lock(modules_mutex);
  modules[{function.threadId(), function.seqNr()}] = around->module;
}

std::string module_of(const at::RecordFunction& function) {
  const std::lock_guard lock(modules_mutex);
  const auto found = modules.find({function.forwardThreadId(), function.seqNr()});
  return found == modules.end() ? std::string() : found->second;
}

// ---- tensors in words ---------------------------------------------------------------------------

bool is_wrapper(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

const at::Tensor* first_tensor(Values values) {
  for (const IValue& value : values) {
    if (value.isTensor() && value.toTensor().defined()) return &value.toTensor();
  }
  return nullptr;
}

std::int64_t block_of(const at::Tensor& physical) { return physical.sizes().back(); }

bool is_block(std::int64_t size) { return size == 4 || size == 8 || size == 16 || size == 32; }

// The format of a dense tensor, as far as ATen distinguishes formats.
std::string format_name(const at::Tensor& tensor) {
  const auto ndims = static_cast<std::size_t>(tensor.dim());
  if (ndims < 3 || ndims > 5 || tensor.layout() != at::kStrided) return "";
  if (tensor.is_contiguous()) return std::string(kPlain.name(ndims));
  const bool last = (ndims == 4 && tensor.is_contiguous(at::MemoryFormat::ChannelsLast)) ||
                    (ndims == 5 && tensor.is_contiguous(at::MemoryFormat::ChannelsLast3d));
  return std::string(last ? kChannelsLast.name(ndims) : "strided");
}

enum class Side { kArgument, kResult };

// Whether a tensor of an op of ours is physical. Our ops take and return physical tensors, except
// that to_blocked takes a dense one and to_dense returns one.
bool is_physical(const at::Tensor& tensor, std::string_view op, Side side) {
  constexpr std::string_view kOurs = "torch_blocked::";
  if (!op.starts_with(kOurs) || tensor.dim() < 4 || !is_block(block_of(tensor))) return false;
  const std::string_view name = op.substr(kOurs.size());
  return name != (side == Side::kArgument ? "to_blocked" : "to_dense") && tensor.is_contiguous();
}

std::string described(const at::Tensor& tensor, std::string_view op, Side side) {
  if (is_physical(tensor, op, side)) return text("physical ", tensor.sizes());
  const std::string format = is_wrapper(tensor) ? "blocked" : format_name(tensor);
  return format.empty() ? text(tensor.sizes()) : text(format, " ", tensor.sizes());
}

// Whether a tensor of `sizes` can be the physical tensor of a blocked one with logical `dims`. The
// sizes of a dense tensor may end in a block size, too.
bool holds(at::IntArrayRef sizes, at::IntArrayRef dims) {
  if (dims.size() < 3 || dims.size() > 5 || sizes.size() != dims.size() + 1) return false;
  const std::int64_t block = sizes.back();
  return is_block(block) && sizes[0] == dims[0] && sizes[1] == (dims[1] + block - 1) / block &&
         sizes.slice(2, dims.size() - 2) == dims.slice(2);
}

std::int64_t bytes_of(Values values) {
  std::int64_t bytes = 0;
  for (const IValue& value : values) {
    if (value.isTensor() && value.toTensor().defined()) {
      bytes += static_cast<std::int64_t>(value.toTensor().numel()) *
               static_cast<std::int64_t>(value.toTensor().itemsize());
    } else if (value.isTensorList()) {
      for (const IValue& each : value.toListRef()) bytes += bytes_of({&each, 1});
    }
  }
  return bytes;
}

// ---- products -----------------------------------------------------------------------------------

double numel(const IValue& value) { return static_cast<double>(value.toTensor().numel()); }
// Products for each element along a weight's first dim.
double row(const IValue& weight) {
  return numel(weight) / static_cast<double>(weight.toTensor().size(0));
}
double last_dim(const IValue& value) {
  return static_cast<double>(value.toTensor().sizes().back());
}

// The number of an op's products: a fixed number, plus some for each element of its result.
struct ProductCount {
  double fixed = 0, each = 0;
};

ProductCount of_convolution(Values in) { return {.each = row(in[1])}; }
ProductCount of_transposed(Values in) { return {.fixed = numel(in[0]) * row(in[1])}; }
ProductCount of_either(Values in) {
  return in[6].toBool() ? of_transposed(in) : of_convolution(in);
}
ProductCount of_gradients(Values in) {
  const double one = numel(in[7].toBool() ? in[1] : in[0]) * row(in[2]);
  const auto mask = in[10].toBoolList();
  return {.fixed = one * (static_cast<double>(mask[0]) + static_cast<double>(mask[1]))};
}
ProductCount of_linear(Values in) { return {.each = last_dim(in[0])}; }
ProductCount of_sum_and_product(Values in) { return {.each = last_dim(in[1])}; }

struct Counted {
  std::string_view op;
  ProductCount (*products)(Values in);
};
constexpr auto kCounted = std::to_array<Counted>({{"aten::conv1d", of_convolution},
                                                  {"aten::conv2d", of_convolution},
                                                  {"aten::conv3d", of_convolution},
                                                  {"aten::conv_transpose1d", of_transposed},
                                                  {"aten::conv_transpose2d", of_transposed},
                                                  {"aten::conv_transpose3d", of_transposed},
                                                  {"aten::convolution", of_either},
                                                  {"aten::_convolution", of_either},
                                                  {"aten::convolution_backward", of_gradients},
                                                  {"aten::linear", of_linear},
                                                  {"aten::matmul", of_linear},
                                                  {"aten::mm", of_linear},
                                                  {"aten::bmm", of_linear},
                                                  {"aten::addmm", of_sum_and_product}});

ProductCount products_of(std::string_view op, Values in) {
  const auto* found = std::ranges::find(kCounted, op, &Counted::op);
  return found == kCounted.end() ? ProductCount() : found->products(in);
}

// ---- the observer -------------------------------------------------------------------------------

// An op inside of the op that is being recorded.
struct Inner {
  std::int64_t start_ns, inside_ns;
};
// Notes on the op that is being recorded. Its arguments are gone when it ends.
struct Running {
  ProductCount products;
  Dims src;                  // logical dims of a blocked argument whose format is not known yet
  std::vector<Dims> made;    // sizes of the last results of inner ops that can be physical
  std::vector<Inner> inner;  // inner ops that are running, outermost first
  std::string slowest;       // the slowest inner op, reported as what the op ran by
  std::int64_t slowest_ns = 0;
};
thread_local Running running;

std::string blocked_format(std::int64_t block, std::size_t ndims) {
  return std::string(Format::blocked(block).name(ndims));
}

// Sets the format of a blocked argument once an inner op has read its physical tensor.
void name_argument(trace::Event& op, const at::Tensor& read) {
  if (running.src.empty() || is_wrapper(read) || !holds(read.sizes(), running.src)) return;
  op.src = text(blocked_format(block_of(read), running.src.size()), " ", running.src);
  running.src.clear();
}

// Remembers the sizes of a tensor that may be the memory of a result.
void note_made(const at::Tensor& tensor) {
  constexpr std::size_t kMost = 16;
  if (is_wrapper(tensor) || tensor.dim() < 4 || !is_block(block_of(tensor))) return;
  if (running.made.size() == kMost) running.made.erase(running.made.begin());
  running.made.push_back(tensor.sizes().vec());
}

// The format of a blocked result with these dims: that of the last inner result that can be its
// physical tensor.
std::string format_of_result(at::IntArrayRef dims) {
  for (const Dims& sizes : std::views::reverse(running.made)) {
    if (holds(sizes, dims)) return blocked_format(sizes.back(), dims.size());
  }
  return "blocked";
}

struct Context : at::ObserverContext {
  enum What { kRange, kOp, kInside, kUnrecorded } what;
  std::size_t place;
  verbose_stream::Hold output;  // oneDNN prints at the op's end, which may be after the recording's
  Context(What kind, std::size_t at) : what(kind), place(at) {}
};

// The time to call the observer with boxed arguments and results, besides the observer's own time:
// 0.1 us for an op with two tensors, more with more arguments.
std::int64_t handing_ns = 0;

std::unique_ptr<at::ObserverContext> on_enter(const at::RecordFunction& function) {
  if (!trace::recording()) {
    if (!verbose_stream::is_open()) return nullptr;
    return std::make_unique<Context>(Context::kUnrecorded, 0);  // it holds the stream
  }
  const std::int64_t since = trace::now_ns();
  if (function.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    trace::Event event{trace::Kind::kModule, function.name(), {}};
    event.module = module_of(function);
    event.is_backward = true;
    return std::make_unique<Context>(Context::kRange, trace::open(std::move(event), since));
  }
  note_module(function);
  if (!function.operator_name()) return nullptr;
  trace::Event* around = trace::innermost();
  if (around) around->recording_ns += handing_ns;
  const at::Tensor* input = first_tensor(function.inputs());
  if (around && around->kind != trace::Kind::kModule) {
    if (input) name_argument(*around, *input);
    const std::int64_t start = trace::now_ns();
    around->recording_ns += start - since;
    running.inner.push_back({start, 0});
    return std::make_unique<Context>(Context::kInside, running.inner.size() - 1);
  }
  trace::Event event{trace::Kind::kOp, function.name(), {}, bytes_of(function.inputs())};
  running = {};
  running.products = products_of(event.op, function.inputs());
  if (input) {
    event.src = described(*input, event.op, Side::kArgument);
    if (is_wrapper(*input)) running.src = input->sizes().vec();
  }
  return std::make_unique<Context>(Context::kOp, trace::open(std::move(event), since));
}

void leave_inner(const at::RecordFunction& function, std::size_t place, std::int64_t at) {
  std::vector<Inner>& inner = running.inner;
  if (inner.size() <= place) return;
  const std::int64_t time = at - inner[place].start_ns;
  const std::int64_t own = time - inner[place].inside_ns;
  inner.resize(place);
  if (place > 0) inner[place - 1].inside_ns += time;
  if (own > running.slowest_ns) {
    running.slowest = function.name();
    running.slowest_ns = own;
  }
  trace::Event* op = trace::innermost();
  if (!op) return;
  const at::Tensor* output = first_tensor(function.outputs());
  if (op->kind == trace::Kind::kOp && output) note_made(*output);
  op->recording_ns += trace::now_ns() - at;
}

void leave_op(const at::RecordFunction& function, std::int64_t at) {
  trace::Event& op = *trace::innermost();
  op.bytes += bytes_of(function.outputs());
  op.flops = 2 * running.products.fixed;
  if (const at::Tensor* output = first_tensor(function.outputs())) {
    op.flops += 2 * running.products.each * static_cast<double>(output->numel());
    op.dst = is_wrapper(*output) ? text(format_of_result(output->sizes()), " ", output->sizes())
                                 : described(*output, op.op, Side::kResult);
  }
  op.recording_ns = std::min(op.recording_ns, at - op.start_ns);
  if (op.implementation.empty() && 2 * running.slowest_ns > at - op.start_ns) {
    op.implementation = running.slowest;
  }
  if (verbose_stream::is_open()) {
    for (std::string& line : verbose_stream::take()) {
      trace::record({trace::Kind::kOneDnn, op.op, std::move(line)});
    }
  }
}

// An observer must not throw. An op with tensors that cannot be read is kept without a description.
void on_leave(const at::RecordFunction& function, at::ObserverContext* context) {
  if (!context) return;
  const std::int64_t at = trace::now_ns();
  const auto& [what, place, output] = *static_cast<const Context*>(context);
  if (what == Context::kUnrecorded) return;
  if (what == Context::kInside) return leave_inner(function, place, at);
  if (what == Context::kOp && trace::innermost()) {
    try {
      leave_op(function, at);
    } catch (const std::exception& error) {
      trace::innermost()->detail = error.what();
    }
  }
  trace::close(place, at);
}

// Nanoseconds of one small op, in the fastest of several rounds.
std::int64_t small_op_ns() {
  constexpr int kRounds = 8, kOps = 64;
  const at::InferenceMode guard;
  const at::Tensor x = at::empty({1}, at::kFloat).zero_();
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (int round = 0; round < kRounds; ++round) {
    const std::int64_t start = trace::now_ns();
    for (int i = 0; i < kOps; ++i) x.add(x);
    least = std::min(least, (trace::now_ns() - start) / kOps);
  }
  return least;
}

ForkMutex observers_mutex;
int observers = 0;
at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;

}  // namespace

void start_observing(bool onednn) {
  if (onednn) verbose_stream::open();
  const std::lock_guard lock(observers_mutex);
  if (observers++ > 0) return;
  const std::int64_t unwatched = small_op_ns();
  handle = at::addGlobalCallback(
      at::RecordFunctionCallback(on_enter, on_leave)
          .needsInputs(true)
          .needsOutputs(true)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  handing_ns = std::max<std::int64_t>(0, small_op_ns() - unwatched);
}

void stop_observing(bool onednn) {
  if (onednn) verbose_stream::close();
  const std::lock_guard lock(observers_mutex);
  if (--observers > 0) return;
  at::removeCallback(handle);
  const std::lock_guard modules_lock(modules_mutex);
  modules.clear();
}

}  // namespace torch_blocked
