// Checks that a graph from a file names only ops of a fixed list, on the CPU.
#include "graph/capture/loadable.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <sstream>
#include <unordered_set>

#include "format/errors.h"

namespace torch_blocked::graph {
namespace {

constexpr std::string_view kOfAten = "aten::";

// As "name.overload".
const std::unordered_set<std::string>& listed_ops() {
  static const std::unordered_set<std::string> listed = [] {
    std::istringstream words(
#include "graph/capture/loadable_ops.inc"
    );
    std::unordered_set<std::string> all;
    for (std::string word; words >> word;) all.insert(word);
    return all;
  }();
  return listed;
}

// In another version of PyTorch, the op of that name could write to its arguments.
bool may_write(const Node& node) {
  const auto op = c10::Dispatcher::singleton().findSchema({node.name, node.overload});
  return op && std::ranges::any_of(op->schema().arguments(), [](const c10::Argument& argument) {
           return argument.alias_info() && argument.alias_info()->isWrite();
         });
}

// Raises if an argument of ATen's op names another device than the CPU or another layout than
// strided.
void check_places(const Node& node) {
  const auto op = c10::Dispatcher::singleton().findSchema({node.name, node.overload});
  for (std::size_t i = 0; op && i < node.arguments.size(); ++i) {
    if (!node.arguments[i].is_constant()) continue;
    const c10::IValue& value = node.arguments[i].constant();
    const c10::Argument& declared = op->schema().arguments()[i];
    if (value.isDevice() && !value.toDevice().is_cpu()) {
      fail_value("load", text("the CPU as ", declared.name(), " of ", node.name),
                 value.toDevice().str(), "optimize the model again");
    }
    const bool is_layout = declared.name() == "layout" && value.isInt();
    if (is_layout && value.toInt() != static_cast<std::int64_t>(at::kStrided)) {
      fail_value("load", text("torch.strided as layout of ", node.name), text(value.toInt()),
                 "optimize the model again");
    }
  }
}

}  // namespace

bool is_loadable(const std::string& name, const std::string& overload) {
  if (name.find("::") == name.npos) return false;
  const bool is_aten = name.starts_with(kOfAten);
  return listed_ops().contains((is_aten ? name.substr(kOfAten.size()) : name) + "." + overload);
}

void check_loadable(const Graph& graph, const std::set<std::string>& more) {
  for (const Node& node : graph.nodes) {
    check_places(node);
    if (more.contains(node.name)) continue;
    if (is_loadable(node.name, node.overload) && !may_write(node)) continue;
    fail_value("load", "ops that change nothing but their results", node.name,
               text("if you trust who wrote the file, name the op: load(file, ops=[\"", node.name,
                    "\"])"));
  }
}

}  // namespace torch_blocked::graph
