// For explain: what could run a layer of bytes. Times each implementation alone, and says why
// others do not take the layer. Plans themselves choose by estimates.
#pragma once

#include "graph/nodes/quantized/quantized.h"
#include "graph/planning/planner.h"

namespace torch_blocked::graph {

// A layer of bytes with memory of its own. The values do not matter for the time.
struct ByteLayer {
  std::string words;  // all that decides its time
  std::string formats;
  Dims src, dst, weight;  // physical src and dst; the weight as the model has it
  std::int64_t outputs;   // each has a scale
  bool is_float32, has_residual;

  // A plan for the layer, ready to run.
  Contest::Entry entry(QuantizedConvolutionPlan plan) const;
};

template <typename Problem>
std::vector<Rival> byte_rivals(Tuner& tuner,
                               const Implementations<Problem, QuantizedConvolutionPlan>& list,
                               const Problem& problem, const ByteLayer& layer) {
  const Contest contest{.name = layer.words,
                        .layer = "",
                        .words = layer.words,
                        .implementations = list.names(),
                        .estimated = [](const char* preferred) { return preferred; },
                        .entry = [&](const char* name, bool) -> std::optional<Contest::Entry> {
                          auto plan = list.plan(list.row(name), problem);
                          return plan ? std::optional(layer.entry(std::move(*plan))) : std::nullopt;
                        }};
  std::vector<Rival> all;
  for (const auto& [name, microseconds] : tuner.all(contest)) {
    all.push_back({name, layer.formats, microseconds, ""});
  }
  for (const auto& [name, why] : list.refusals(problem)) {
    all.push_back({name, layer.formats, 0, why});
  }
  return all;
}

}  // namespace torch_blocked::graph
