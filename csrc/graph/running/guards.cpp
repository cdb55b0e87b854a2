// Decides for which inputs a graph is what the model computes.
//
// The nodes were recorded in one run of the model, together with what Python asked about sizes in
// that run and the answers. For inputs that give the same answers, Python would have called the
// same ops.
#include <algorithm>
#include <exception>

#include "graph/graph.h"
#include "runtime/interrupts.h"

namespace torch_blocked::graph {
namespace {

Dims answer(const Question& question, const Dims& dims) {
  switch (question.what) {
    case Question::kSizes:
      return dims;
    case Question::kRank:
      return {std::ssize(dims)};
    case Question::kElements:
      return {c10::multiply_integers(dims)};
    case Question::kOnePixel:
      return {dims.size() > 2 && c10::multiply_integers(at::IntArrayRef(dims).slice(2)) == 1};
    case Question::kAtLeast: {
      if (question.answer.size() != 3) return {};
      const std::int64_t dim = question.answer[0], length = question.answer[1];
      if (dim < 0 || dim >= std::ssize(dims)) return {};
      return {dim, length, dims[static_cast<std::size_t>(dim)] >= length};
    }
    default:
      if (question.what >= std::ssize(dims)) return {};
      return {dims[static_cast<std::size_t>(question.what)]};
  }
}

bool same_kind(const Meta& a, const Meta& b) {
  return a.dtype == b.dtype && a.dims.size() == b.dims.size();
}

}  // namespace

bool covers(const Graph& graph, const std::vector<Meta>& inputs) {
  if (inputs == graph.input_metas || std::ranges::count(graph.also, inputs) > 0) return true;
  if (!std::ranges::equal(inputs, graph.input_metas, same_kind) || graph.fixed_sizes) return false;
  std::vector<Meta> metas;
  try {
    metas = infer(graph, inputs);
  } catch (const std::exception& error) {  // an op refuses the sizes, or sizes depend on values
    if (is_interrupt(error)) throw;
    return false;
  }
  return std::ranges::all_of(graph.questions, [&](const Question& question) {
    const Meta& meta = metas[static_cast<std::size_t>(question.value)];
    return answer(question, meta.dims) == question.answer;
  });
}

}  // namespace torch_blocked::graph
