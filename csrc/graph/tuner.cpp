// Times the implementations of a convolution on its real shape.
#include <ATen/Parallel.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <chrono>
#include <fstream>

#include "format/errors.h"
#include "graph/plan.h"
#include "runtime/isa.h"

namespace torch_blocked::graph {
namespace {

using Clock = std::chrono::steady_clock;

// Rounds until this much time has gone, at least kLeastRounds: the best of a few is within some
// percent of the truth, and one model has up to a hundred problems.
constexpr std::chrono::microseconds kTime{1500};
constexpr int kLeastRounds = 3;

double time_of(const ConvolutionPlan& plan, const ConvolutionBuffers& buffers) {
  plan.run(buffers);  // generated code, workspaces, caches
  double best = 1e30;
  const auto begin = Clock::now();
  for (int round = 0; round < kLeastRounds || Clock::now() - begin < kTime; ++round) {
    const auto start = Clock::now();
    plan.run(buffers);
    best = std::min(best, std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  return best;
}

// Memory for one problem; the values do not matter for the time, but denormals would.
struct Probe {
  at::Tensor src, dst, weight, bias;

  explicit Probe(const ConvolutionProblem& p) {
    const auto options = at::TensorOptions().dtype(p.dtype);
    const auto filled = [&](const Dims& dims) { return at::full(dims, 0.01, options); };
    src = filled(physical_dims(p.src_dims, p.src_block));
    dst = filled(physical_dims(p.dst_dims, p.dst_block));
    weight = filled(p.weight_dims);
    bias = filled({p.dst_dims[1]});
  }

  double run(const ConvolutionProblem& p, const ConvolutionPlan& plan) const {
    const at::Tensor packed = pack_weights(plan, weight);
    return time_of(plan, {.src = src.const_data_ptr(),
                          .weights = packed.const_data_ptr(),
                          .bias = p.has_bias ? bias.const_data_ptr() : nullptr,
                          .residual = p.epilogue.residual ? dst.const_data_ptr() : nullptr,
                          .dst = dst.mutable_data_ptr()});
  }
};

// The problem in words: a line's key in the file of measurements.
std::string name_of(const ConvolutionProblem& p) {
  const auto& [before, after, residual] = p.epilogue;
  return text(isa_name(isa()), " ", at::get_num_threads(), " ", c10::toString(p.dtype), " ",
              p.src_dims, p.weight_dims, p.dst_dims, p.stride, p.padding, p.dilation, " g",
              p.groups, " f", p.src_block, "-", p.dst_block, p.transposed ? " transposed" : "",
              p.has_bias ? " bias" : "", " e", static_cast<std::int64_t>(before.kind), residual,
              static_cast<std::int64_t>(after.kind));
}

}  // namespace

Tuner::Tuner(bool enabled, std::string path) : enabled_(enabled), path_(std::move(path)) {
  std::ifstream file(path_);
  // <problem> TAB <implementation> TAB <microseconds>; a line that is broken is measured again.
  const std::vector<std::string> names = convolution_implementations();
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find('\t'), second = line.rfind('\t');
    if (first == line.npos || first == second) continue;
    Choice choice{line.substr(first + 1, second - first - 1), std::atof(&line[second + 1])};
    const bool valid = std::ranges::find(names, choice.implementation) != names.end();
    if (valid && choice.microseconds > 0) known_[line.substr(0, first)] = choice;
  }
}

std::optional<Tuner::Choice> Tuner::best(const ConvolutionProblem& problem) {
  const std::string name = name_of(problem);
  if (const auto found = known_.find(name); found != known_.end()) return found->second;
  std::optional<Choice> best;
  if (!enabled_) {
    best = Choice{plan_convolution(problem).name, 0};
    if (!problem.blocked() && best->implementation != "onednn_blocked") best = std::nullopt;
    return known_[name] = best;
  }
  std::optional<Probe> probe;
  for (const std::string& implementation : convolution_implementations()) {
    // The slow ways out are for when nothing else is left.
    if (best && (implementation == "aten" || implementation == "onednn_channels_last")) continue;
    const auto named = plan_convolution(problem, implementation);
    if (!named) continue;
    if (!probe) probe.emplace(problem);
    const double microseconds = probe->run(problem, named->plan);
    if (!best || microseconds < best->microseconds) best = Choice{implementation, microseconds};
  }
  if (best && !path_.empty()) {
    std::ofstream(path_, std::ios::app)
        << name << '\t' << best->implementation << '\t' << best->microseconds << '\n';
  }
  return known_[name] = best;
}

}  // namespace torch_blocked::graph
