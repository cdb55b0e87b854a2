// Registers blocked forms of other libraries' ops, and checks their schemas and their results.
#include "ops/blocked_forms.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <mutex>
#include <set>

#include "format/errors.h"
#include "ops/registered.h"
#include "runtime/fork.h"

namespace torch_blocked {
namespace {

// Names of forms by the op's name. Several forms of one op are an error. It is raised at the first
// use, because forms are registered while libraries are loaded, where an exception would end the
// process.
struct Forms {
  std::map<std::string, std::set<std::string>> of;
  std::map<std::string, c10::OperatorName> checked;  // forms that the first use found to fit
  ForkMutex mutex{[this] { abandon(checked); }};

  static Forms& all() {
    static Forms forms;
    return forms;
  }
};

// "my::swish.out" -> my::swish, out
c10::OperatorName parsed(const std::string& name) {
  const std::size_t dot = name.find('.');
  return {name.substr(0, dot), dot == name.npos ? "" : name.substr(dot + 1)};
}

const c10::FunctionSchema& schema_of(const std::string& name) {
  const auto op = c10::Dispatcher::singleton().findSchema(parsed(name));
  if (!op)
    fail_value("register", "the name of a torch op", name, "define it, and mind its overload");
  return op->schema();
}

// Whether `form` has the arguments of `op`, plus the channels after the first.
bool fits(const c10::FunctionSchema& op, const c10::FunctionSchema& form) {
  const auto& dense = op.arguments();
  const auto& blocked = form.arguments();
  const auto is_tensor = [](const c10::Argument& each) {
    return each.type()->kind() == c10::TypeKind::TensorType;
  };
  if (dense.empty() || blocked.size() != dense.size() + 1) return false;
  if (op.returns().size() != 1 || form.returns().size() != 1) return false;
  if (!is_tensor(dense[0]) || !is_tensor(blocked[0])) return false;
  if (!is_tensor(op.returns()[0]) || !is_tensor(form.returns()[0])) return false;
  if (blocked[1].type()->kind() != c10::TypeKind::IntType) return false;
  for (std::size_t i = 1; i < dense.size(); ++i) {
    if (*dense[i].type() != *blocked[i + 1].type()) return false;
  }
  const auto is_new = [](const c10::FunctionSchema& schema) {
    return !schema.is_mutable() && !schema.returns()[0].alias_info();
  };
  return is_new(op) && is_new(form);
}

}  // namespace

void register_blocked_form(std::string op, std::string blocked) {
  Forms& forms = Forms::all();
  const std::lock_guard lock(forms.mutex);
  forms.checked.erase(op);
  forms.of[std::move(op)].insert(std::move(blocked));
}

void check_blocked_form(const std::string& op, const std::string& blocked) {
  const c10::FunctionSchema& dense = schema_of(op);
  if (fits(dense, schema_of(blocked))) return;
  fail_value("register",
             text("a blocked form of ", toString(dense),
                  " with an int, the channels, after the first argument"),
             toString(schema_of(blocked)), "give it the same arguments and one result");
}

std::optional<c10::OperatorName> blocked_form(const c10::OperatorName& op) {
  Forms& forms = Forms::all();
  const std::lock_guard lock(forms.mutex);
  const std::string name = toString(op);
  if (const auto at = forms.checked.find(name); at != forms.checked.end()) return at->second;
  const auto found = forms.of.find(name);
  if (found == forms.of.end()) return std::nullopt;
  if (found->second.size() > 1) {
    fail_value("register", text("one blocked form of ", name), text(found->second),
               "register one of them");
  }
  const std::string& form = *found->second.begin();
  check_blocked_form(name, form);
  return forms.checked.emplace(name, parsed(form)).first->second;
}

namespace {

// Does not raise a type that lets an op run on dense copies: that would hide a wrong kernel.
[[noreturn]] void fail_form(const std::string& op, const std::string& form,
                            const std::string& expected, const std::string& got,
                            const std::string& remedy) {
  throw std::runtime_error(error_sentence(
      "register", text(expected, " from ", form, ", the blocked form of ", op), got, remedy));
}

// [N, ceil(C/b), *spatial, b]
std::vector<c10::SymInt> physical_sizes(const FormResult& wanted) {
  std::vector<c10::SymInt> sizes = wanted.dims;
  sizes[1] = (sizes[1] + wanted.block - 1) / wanted.block;
  sizes.emplace_back(wanted.block);
  return sizes;
}

}  // namespace

void check_form_result(const std::string& op, const std::string& form, const at::Tensor& result,
                       const std::vector<at::Tensor>& arguments, const FormResult& wanted) {
  const at::Tensor& physical = arguments.at(0);
  const auto require = [&](bool holds, const std::string& expected, const std::string& got,
                           const char* remedy) {
    if (!holds) fail_form(op, form, expected, got, remedy);
  };
  require(result.defined(), "a tensor", "none", "return what the op returns, in blocked memory");
  require(result.is_cpu() && result.layout() == at::kStrided, "a strided CPU tensor",
          result.toString(), "compute on the memory that comes");
  if (wanted.dims.empty()) {
    const bool fits =
        result.dim() == physical.dim() && result.sym_size(0) == physical.sym_size(0) &&
        result.sym_size(1) == physical.sym_size(1) && result.sym_size(-1) == physical.sym_size(-1);
    require(fits, text("as many images and blocks of channels as ", physical.sym_sizes(), " has"),
            text(result.sym_sizes()), "give the op a fake if its results have other dims");
  } else {
    const auto sizes = physical_sizes(wanted);
    require(result.sym_sizes() == c10::SymIntArrayRef(sizes),
            text("the physical tensor ", sizes, " of the op's result ", wanted.dims),
            text(result.sym_sizes()), "correct the form, or the fake of the op");
  }
  if (wanted.dtype) {
    require(result.scalar_type() == *wanted.dtype, text(*wanted.dtype, " as the op's fake says"),
            text(result.scalar_type()), "correct the form, or the fake of the op");
  }
  for (const at::Tensor& argument : arguments) {
    const bool shares = result.has_storage() && argument.has_storage() &&
                        result.storage().is_alias_of(argument.storage());
    require(!shares, "memory of its own", "a view of an argument", "return a clone()");
  }
}

void check_form_tail(const std::string& op, const std::string& form, const at::Tensor& result,
                     std::int64_t channels) {
  if (tail_is_zero(result, channels)) return;
  fail_form(op, form, text("a zero tail beyond channel ", channels),
            text("other values in ", result.sizes()),
            "leave these lanes 0, or call torch_blocked::clear_tail at its end");
}

}  // namespace torch_blocked
