// Saves and restores what a TorchScript module keeps between calls: attributes that Python does not
// see.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace torch_blocked::graph {

// A value as it was: the value itself, a copy of a tensor's memory, and the items of a list, a
// tuple, a dict (keys and values in turn) or an object (its slots).
struct HeldValue {
  c10::IValue value;
  at::Tensor memory = {};
  std::vector<HeldValue> items = {};
};

// A snapshot of a module's attributes and of those of the modules and objects in it. Parameters are
// left out.
class ScriptState {
 public:
  explicit ScriptState(const c10::IValue& module);
  // Names of the attributes that have changed, such as "part.calls".
  std::vector<std::string> changes() const;
  // Puts all back.
  void restore() const;

 private:
  struct Slot {
    std::string name;
    c10::intrusive_ptr<c10::ivalue::Object> object;
    std::size_t place;
    HeldValue before;
  };
  void add(const c10::intrusive_ptr<c10::ivalue::Object>& object, const std::string& prefix);

  std::vector<Slot> slots_;
};

}  // namespace torch_blocked::graph
