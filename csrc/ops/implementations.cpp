// The families of implementations: their names, forcing one, and the fingerprint of measured times.
#include "ops/implementations.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <oneapi/dnnl/dnnl.hpp>
#include <string_view>

#include "format/errors.h"
#include "runtime/trace/trace.h"

namespace torch_blocked {
namespace {

// The lists register themselves here before main().
std::vector<Family*>& registered() {
  static std::vector<Family*> all;
  return all;
}

// Indexed by the family's place in registered(). It grows when this thread needs more.
thread_local std::vector<const char*> last_of_families;

}  // namespace

bool fewer_products_allowed() {
  static const bool allowed = [] {
    const char* setting = std::getenv("TORCH_BLOCKED_WINOGRAD");
    return !setting || std::string_view(setting) != "0";
  }();
  return allowed;
}

Family::Family(const char* name, std::vector<const char*> names)
    : name_(name), names_(std::move(names)), index_(registered().size()) {
  registered().push_back(this);
}

void Family::force(const std::string& implementation) {
  const bool all = implementation.empty();
  forced_ = all ? -1 : static_cast<int>(place("force_implementation", implementation));
}

const char* Family::last() const {
  const char* name = index_ < last_of_families.size() ? last_of_families[index_] : nullptr;
  return name ? name : "none";
}

void Family::set_last(const char* implementation) const {
  if (trace::recording()) trace::note_implementation(implementation);
  if (index_ >= last_of_families.size()) last_of_families.resize(registered().size());
  last_of_families[index_] = implementation;
}

void Family::check_estimates(std::size_t count) const {
  TORCH_INTERNAL_ASSERT(count == 0 || count == names_.size(), name_, ": ", count, " of ",
                        names_.size(), " rows have an estimate");
}

std::size_t Family::place(const char* op, const std::string& implementation) const {
  const auto found = std::ranges::find(names_, implementation);
  if (found == names_.end()) fail_value(op, text("one of ", names_), implementation, "");
  return static_cast<std::size_t>(found - names_.begin());
}

void Family::fail_forced(const char* implementation, const std::string& problem) const {
  fail_not_implemented(
      name_, text("a problem for ", implementation), problem,
      text("force_implementation(\"", name_, "\", \"\") allows every implementation"));
}

const std::vector<Family*>& families() { return registered(); }

Family& family(const std::string& name) {
  std::vector<std::string> names;
  for (Family* each : registered()) {
    if (each->name() == name) return *each;
    names.emplace_back(each->name());
  }
  fail_value("force_implementation", text("one of ", names), name, "");
}

std::string fingerprint() {
  std::vector<std::string> parts;  // sorted, so that the link order does not matter
  for (const Family* each : registered()) parts.push_back(text(each->name(), each->names()));
  std::ranges::sort(parts);
  const dnnl_version_t& onednn = *dnnl_version();
  return text(parts, " ", TORCH_BLOCKED_SOURCES, " oneDNN ", onednn.major, ".", onednn.minor, ".",
              onednn.patch, " ", onednn.hash, fewer_products_allowed() ? "" : " all products");
}

}  // namespace torch_blocked
