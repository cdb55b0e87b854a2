// Finds the formats that a module wants: asks each row of its list for each candidate format and
// takes the lowest estimate.
#include "ops/wanted_formats.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "format/errors.h"
#include "runtime/isa.h"
#include "runtime/onednn/descriptor_md.h"

namespace torch_blocked {
namespace {

constexpr const char* kWantedFormatsOp = "wanted_formats";

DataType data_type_of(at::ScalarType dtype) {
  for (int value = 1; value <= static_cast<int>(DataType::f64); ++value)
    if (scalar_type(static_cast<DataType>(value)) == dtype) return static_cast<DataType>(value);
  fail_type(kWantedFormatsOp, "weights of a type that oneDNN has", c10::toString(dtype),
            "convert them");
}

// Dense memory with the dims in logical order.
Descriptor plain(const Dims& dims, at::ScalarType dtype) {
  const std::string_view letters = "abcdefghijkl";
  return Descriptor::with_tag(dims, data_type_of(dtype), parse_tag(letters.substr(0, dims.size())));
}

// Raises ValueError for dims without elements: no kernel reads them, so none wants a format.
void check_volume(std::string_view what, const Dims& dims) {
  if (std::ranges::any_of(dims, [](std::int64_t size) { return size < 1; }))
    fail_value(kWantedFormatsOp, text(what, " with elements"), text(dims),
               "pass an input of the usual sizes");
}

struct Candidate {
  ConvolutionProblem problem;  // in a format
  NamedPlan named;
  double microseconds;
};

// Adds the row's plan of the problem in a format, if there is one. Most estimates hold for blocked
// formats only.
void add_candidate(std::vector<Candidate>& candidates, ConvolutionProblem p, Format format,
                   const ConvolutionImplementations::Row& row) {
  if (!format.is_blocked() && !row.traits.any_format) return;
  p.src_format = p.dst_format = format;
  const double microseconds = ConvolutionImplementations::estimate(row, p);
  if (auto named = plan_convolution(p, row.name))
    candidates.push_back({std::move(p), std::move(*named), microseconds});
}

std::vector<Candidate> candidates_of(const ConvolutionProblem& p,
                                     const std::optional<std::string>& implementation) {
  const auto& list = convolution_implementations();
  if (implementation) list.row(*implementation);  // refuses an unknown name
  std::vector<Format> formats;
  for (const std::int64_t block : native_blocks()) formats.push_back(Format::blocked(block));
  formats.push_back(kChannelsLast);
  std::vector<Candidate> candidates;
  for (const Format format : formats)
    for (const auto& row : list.rows())
      if (!implementation || *implementation == row.name) add_candidate(candidates, p, format, row);
  return candidates;
}

}  // namespace

WantedFormats wanted_formats(const ConvolutionProblem& p,
                             const std::optional<std::string>& implementation) {
  check_volume("an input", p.src_dims);
  if (implementation == kAsksOneDnn) return formats_wanted_by_onednn(p);
  const auto candidates = candidates_of(p, implementation);
  if (candidates.empty())
    fail_not_implemented(
        kWantedFormatsOp, "a convolution that the implementation takes",
        text(implementation.value_or("any"), " for weight ", p.weight_dims, " on ", p.src_dims),
        "ask without an implementation");
  const Candidate& best = *std::ranges::min_element(candidates, {}, &Candidate::microseconds);
  const LayerPlan& plan = best.named.plan;
  const DataType type = data_type_of(p.dtype);
  // Only ATen takes the weights as they are.
  const auto weights = plan.weights_format.empty() ? std::optional(plain(p.weight_dims, p.dtype))
                                                   : plan.weights_desc;
  return {best.named.name, best.problem.src_format.descriptor(p.src_dims, type), weights,
          best.problem.dst_format.descriptor(p.dst_dims, type)};
}

WantedFormats wanted_formats(const LinearProblem& p,
                             const std::optional<std::string>& implementation) {
  check_volume("rows, inputs and outputs", {p.rows, p.inputs, p.outputs});
  const auto names = linear_implementations_for(p);
  const auto found =
      implementation ? std::ranges::find(names, std::string_view(*implementation)) : names.begin();
  if (found == names.end())
    fail_not_implemented(kWantedFormatsOp, text("one of ", names, ", which take these sizes"),
                         *implementation, "ask without an implementation");
  return {*found, plain({p.rows, p.inputs}, at::kFloat), plan_linear(p, *found).weights_desc,
          plain({p.rows, p.outputs}, at::kFloat)};
}

}  // namespace torch_blocked
