// Chooses which implementations of a convolution are timed, by estimates and lower bounds, and
// gives the tuner what it needs to time them.
#include "graph/nodes/layers/contest.h"

#include "format/errors.h"
#include "graph/nodes/layers/layer_step.h"
#include "kernels/fma_peak.h"
#include "ops/convolution_time.h"
#include "runtime/isa.h"
#include "torch_blocked/threads.h"

namespace torch_blocked::graph {

double flops_of(const ConvolutionProblem& p) {
  const Dims& pixels = p.transposed ? p.src_dims : p.dst_dims;  // where a whole kernel is applied
  return 2.0 * static_cast<double>(c10::multiply_integers(p.weight_dims)) *
         static_cast<double>(c10::multiply_integers(pixels) / pixels[1]);
}

namespace {

// Microseconds of the FMAs alone. The peak was measured at one moment, and clocks may rise above
// it.
double fma_microseconds(const ConvolutionProblem& p) {
  static const double peak = 1.1 * fma_peak_gflops();
  return flops_of(p) / (1e3 * peak * threads());
}

}  // namespace

// A lower bound, in microseconds, for any kernel that sums all products.
double least_microseconds(const ConvolutionProblem& p) {
  // Six AMX instructions make 256 x 32 products in 96 cycles; FMAs make 32 in one.
  constexpr double kByTiles = 6 * 16 * 32. / (256 * 32);
  return fma_microseconds(p) * part_inside(p) * (convolutions::amx.refuses(p) ? 1 : kByTiles);
}

// The most that another format than the blocked one can save, measured on 600 layers in each
// format. Compared with the blocked kernels' time, kernels for channels-last took at least 0.9; at
// least 0.8 on maps of at most 8x8, where weights count; and on AVX2 at least 0.93 on maps of any
// size. Depthwise kernels took as long, and plain ones at least 1.1.
// Blocked kernels waste lanes where channels do not fill a block. That cost more than half of the
// time on src of 3 channels, and less elsewhere: layers of 8 channels took 0.81 of the time in
// other formats, and 1x1 layers to 2 plain channels 0.73. Where the blocked kernel is far from the
// peak, the one for channels-last may be near it.
double least_beside(const ConvolutionProblem& p, double known, Format of_blocks) {
  constexpr std::int64_t kFewPixels = 64;
  constexpr double kLanesAtLeast = 0.85, kLanesAtLeastPlain = 0.6;
  constexpr double kFar = 3, kSmall = 50;
  const double least = least_microseconds(p), by_fmas = fma_microseconds(p) * part_inside(p);
  const bool is_plain = p.dst_format == kPlain;
  if (!is_plain && known > kFar * by_fmas + kSmall) return least;
  const auto filled = [&](std::int64_t channels) {
    return static_cast<double>(channels) /
           static_cast<double>(of_blocks.blocks(channels) * of_blocks.block);
  };
  const auto used = [&](std::int64_t channels) {
    return std::max(filled(channels), is_plain ? kLanesAtLeastPlain : kLanesAtLeast);
  };
  const std::int64_t pixels = c10::multiply_integers(p.dst_dims) / p.dst_dims[1];
  const double saved = is_plain                    ? 1.1
                       : p.groups == p.src_dims[1] ? 1
                       : isa() == Isa::kAvx2       ? 0.93
                       : pixels > kFewPixels       ? 0.9
                                                   : 0.8;
  const std::int64_t inputs = p.src_dims[1];
  const double of_src = p.src_format == kPlain   ? 1
                        : inputs <= kFewChannels ? filled(inputs)
                                                 : used(inputs);
  const double alone = saved * std::min(of_src, used(p.dst_dims[1])) * known;
  return std::max(Contest::Reference::kHandicap * alone, least);
}

// The bounds were checked on float32 layers only.
bool is_known(const ConvolutionProblem& p) { return p.dtype == at::kFloat; }

namespace {

// The problem's name in the file of times: everything that decides its time.
std::string name_of(const ConvolutionProblem& p) {
  const auto& [before, after, residual] = p.epilogue;
  return text(c10::toString(p.dtype), " ", p.src_dims, p.weight_dims, p.dst_dims, p.stride,
              p.padding, p.dilation, " g", p.groups, " ", p.src_format.name(p.src_dims.size()), "-",
              p.dst_format.name(p.dst_dims.size()), p.transposed ? " transposed" : "",
              p.has_bias ? " bias" : "", " e", static_cast<std::int64_t>(before.kind), residual,
              static_cast<std::int64_t>(after.kind));
}

// The same without the sizes of images.
std::string layer_of(ConvolutionProblem p) {
  for (Dims* dims : {&p.src_dims, &p.dst_dims}) {
    (*dims)[0] = 1;
    std::fill(dims->begin() + 2, dims->end(), 1);
  }
  return name_of(p);
}

// An implementation on a probe. The first implementation that takes the problem creates the probe.
std::optional<Contest::Entry> entry_of(const ConvolutionProblem& p,
                                       std::optional<LayerProbe>& probe, const char* implementation,
                                       bool known) {
  const Traits& traits = convolution_implementations().row(implementation).traits;
  if (known && traits.last_resort) return std::nullopt;
  auto named = plan_convolution(p, implementation);
  if (!named) return std::nullopt;
  if (!probe) probe.emplace(p, p.weight_dims);
  return probe->entry(std::move(named->plan));
}

// The fastest by estimates, if estimates hold for the problem's formats.
const char* estimated(const ConvolutionProblem& p, const char* preferred) {
  if (preferred) {
    if (const auto named = plan_convolution(p, preferred)) return named->name;
  }
  const char* name = plan_convolution(p).name;
  const Traits& traits = convolution_implementations().row(name).traits;
  return p.blocked() || traits.any_format ? name : nullptr;
}

// Removes implementations that refuse the problem: they cannot run it even if they are asked for by
// name.
void drop_refusing(std::vector<const char*>& names, const ConvolutionProblem& p) {
  const auto& list = convolution_implementations();
  std::erase_if(names, [&](const char* name) { return list.refuses(list.row(name), p); });
}

// A contest of all implementations.
Contest contest_of(const ConvolutionProblem& problem, std::optional<LayerProbe>& probe) {
  return {
      .name = name_of(problem),
      .layer = layer_of(problem),
      .words = text("convolution ", problem.src_dims, " -> ", problem.dst_dims),
      .implementations = convolution_implementations().names(),
      .estimated = [&](const char* preferred) { return estimated(problem, preferred); },
      .entry = [&](const char* name, bool known) { return entry_of(problem, probe, name, known); }};
}

// Keeps those implementations in a contest that may be the fastest: their estimates are near the
// least. For the layers of 44 models on Zen 4, the estimate of the fastest was always within a
// factor of 1.4 of the least, and within 1.1 where the difference mattered by more than 8 %. On a
// Xeon with AMX some are further away, which costs 0.4 to 0.6 % of all layers' time. The others are
// timed only if these are unreasonably slow.
void keep_likely(Contest& contest, const ConvolutionProblem& p) {
  constexpr double kFar = 1.4, kSlow = 2, kSmall = 50, kBytesPerMicrosecond = 10e3;
  const auto& list = convolution_implementations();
  const double least = list.least_estimate(p);
  contest.implementations.clear();
  for (const auto& row : list.rows()) {
    const double estimate = list.estimate(row, p);
    const bool must_be_least = row.traits.yardstick || row.traits.only_measured;
    const bool is_likely = must_be_least ? estimate <= least : estimate < kFar * least;
    (is_likely ? contest.implementations : contest.others).push_back(row.name);
  }
  const std::int64_t values =
      c10::multiply_integers(p.src_dims) + c10::multiply_integers(p.dst_dims);
  contest.expected =
      kSmall + kSlow * fma_microseconds(p) +
      sizeof(float) * static_cast<double>(values) / (kBytesPerMicrosecond * threads());
}

// A contest of the implementations that may be the fastest, if estimates hold, else of all.
Contest open_contest(const Tuner& tuner, const ConvolutionProblem& problem,
                     std::optional<LayerProbe>& probe) {
  Contest contest = contest_of(problem, probe);
  const bool estimates_hold = problem.blocked() && is_known(problem);
  if (estimates_hold && !tuner.times_all()) keep_likely(contest, problem);
  drop_refusing(contest.implementations, problem);
  drop_refusing(contest.others, problem);
  return contest;
}

}  // namespace

std::optional<Tuner::Choice> fastest(Tuner& tuner, const ConvolutionProblem& problem,
                                     const std::optional<Beside>& beside) {
  std::optional<LayerProbe> probe, other;
  Contest contest = open_contest(tuner, problem, probe);
  if (beside && beside->choice.microseconds > 0) {
    contest.reference = [&]() -> std::optional<Contest::Reference> {
      const auto& [implementation, microseconds] = beside->choice;
      auto entry = entry_of(beside->problem, other, implementation.c_str(), false);
      if (!entry) return std::nullopt;
      return Contest::Reference{*std::move(entry), microseconds};
    };
  }
  return tuner.best(contest);
}

std::vector<Tuner::Choice> all_timed(Tuner& tuner, const ConvolutionProblem& problem) {
  std::optional<LayerProbe> probe;
  return tuner.all(contest_of(problem, probe));
}

}  // namespace torch_blocked::graph
