// Files of measured times: however their lines are broken and whenever they grow, a problem has the
// time of its last whole line, or none.
//
// The reader has no name outside of its source, so the source is part of this one.
#include <ATen/Parallel.h>
// Newer names of instructions are unknown to some compilers; nothing that asks for them runs here.
#define __builtin_cpu_supports(name) 0
#include "graph/planning/tuner.cpp"
#undef __builtin_cpu_supports

#include <fstream>
#include <map>
#include <sstream>

#include "from_bytes.h"
#include "temporary_folder.h"

// What measures times is not linked: no line of a file leads there.
namespace torch_blocked {
Isa isa() { std::abort(); }
const char* isa_name(Isa) { std::abort(); }
int threads() { std::abort(); }
void on_all_threads(c10::function_ref<void()>) { std::abort(); }
void share_units(std::int64_t, std::int64_t, c10::function_ref<void(Pieces&)>) { std::abort(); }
WorkTimer::WorkTimer() { std::abort(); }
WorkTimer::~WorkTimer() { std::abort(); }
std::chrono::nanoseconds WorkTimer::elapsed() const { std::abort(); }
}  // namespace torch_blocked

namespace torch_blocked::graph {
namespace {

using fuzz::Bytes;
using fuzz::must_hold;
using Choices = std::map<std::string, Tuner::Choice>;

// What a byte of the input says to do with the part of the file before it.
constexpr char kAppend = '\1', kRemove = '\2';

std::optional<std::pair<std::string, Tuner::Choice>> parsed(const std::string& line) {
  const std::size_t first = line.find('\t'), last = line.rfind('\t');
  if (first == line.npos || first == last) return std::nullopt;
  const std::string number = line.substr(last + 1);
  // What strtod takes and a file of ours never has.
  if (number.find_first_not_of("0123456789.eE+-") != number.npos) return std::nullopt;
  if (number.empty()) return std::nullopt;
  char* end = nullptr;
  const double time = std::strtod(number.c_str(), &end);
  if (*end != '\0' || !std::isfinite(time)) return std::nullopt;
  if (time < std::numeric_limits<double>::min()) return std::nullopt;
  return std::pair{line.substr(0, first),
                   Tuner::Choice{line.substr(first + 1, last - first - 1), time}};
}

Choices choices_of(std::string_view content) {
  Choices choices;
  std::istringstream lines{std::string(content.substr(0, content.rfind('\n') + 1))};
  for (std::string line; std::getline(lines, line);) {
    if (const auto each = parsed(line)) choices[each->first] = each->second;
  }
  return choices;
}

void check(const std::string& path, std::string_view content) {
  if (content.rfind('\n') == content.npos) content = {};
  for (const auto& [problem, choice] : choices_of(content)) {
    const auto found = Measurements::find(path, problem);
    must_hold(found && found->implementation == choice.implementation &&
                  found->microseconds == choice.microseconds,
              "a problem has the time of its last whole line: " + problem);
  }
  must_hold(!Measurements::find(path, "a problem that no line has\t"), "others have none");
}

void run(Bytes& bytes) {
  static const fuzz::TemporaryFolder folder;
  const std::string path = folder.path() / "times";
  std::filesystem::remove(path);
  check(path, "");
  std::string content;
  std::string_view rest = bytes.rest();
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find_first_of("\1\2"), rest.size());
    content += rest.substr(0, end);
    std::ofstream(path, std::ios::app | std::ios::binary) << rest.substr(0, end);
    check(path, content);
    if (end < rest.size() && rest[end] == kRemove) {
      std::filesystem::remove(path);
      content.clear();
      check(path, content);
    }
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
}

}  // namespace
}  // namespace torch_blocked::graph

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  torch_blocked::fuzz::Bytes bytes(data, size);
  torch_blocked::graph::run(bytes);
  return 0;
}
