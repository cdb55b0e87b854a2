// The ops that a forward calls, noted while it runs.
//
// PyTorch tells observers of each call through its dispatcher, for its profiler's sake; the
// outermost calls are the forward in ATen's own words: conv2d, batch_norm, relu_. Tracing by
// torch.export gives the same for 100 MiB of Python modules and 1.5 s.
//
// The recorder knows which values vary, that is depend on values of the inputs or are random. A
// number that Python reads from a value that does not vary is the same for all inputs of the
// capture, and its op becomes no node; a number from a varying value ends the record.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <unordered_map>
#include <unordered_set>

#include "graph/capture/view_writes.h"
#include "graph/graph.h"

namespace at {
struct RecordFunction;
}
namespace c10 {
class OperatorHandle;
}

namespace torch_blocked::graph {

// Values are numbered as they come: inputs, then constants and results by their first use. In-place
// ops become functional ones; after a write into memory that several tensors show, each of them is
// made anew where it is used next. Memory of `state` and of inputs that the forward writes is put
// back by restore().
class Recorder {
 public:
  // Hears of each tensor that an op has made, before anyone else does.
  using OnResult = std::function<void(const at::Tensor&)>;

  // Says where the op that begins was called.
  using Where = std::function<Origin()>;

  Recorder(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& state,
           OnResult on_result, Where where);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  ~Recorder() { stop(); }

  // From now on this thread's ops are noted, until stop().
  void start();
  void stop();
  const std::vector<Node>& nodes() const { return nodes_; }
  // Tensors that were there before: parameters, buffers and others.
  const std::map<Value, at::Tensor>& constants() const { return constants_; }
  Value value_of(const at::Tensor& tensor);
  // Notes that Python asked for sizes of a value (Question); constants always give the same answer.
  void ask(const at::Tensor& tensor, std::int64_t what, Dims answer);
  // Whether the values of a tensor are the same for all inputs that give the same answers: they
  // follow from constants and sizes. A constant that Python reads is one of the capture's.
  bool is_constant(const at::Tensor& tensor);
  // Notes that Python sees the memory of a tensor, so that a write into it is one that others see.
  void expose(const at::Tensor& tensor);
  // The same of the op that runs now.
  bool runs_constant_op() const;
  const std::vector<Question>& questions() const { return questions_; }
  const std::map<Value, Meta>& metas() const { return metas_; }
  void restore();
  // Whether the forward wrote memory of `state` or of inputs, even by results that ATen does not
  // call views, as those of unsafe_chunk.
  bool wrote_state() const { return wrote_state_; }
  // What the ops took, without what Python and the recorder do between them.
  std::chrono::duration<double> seconds_in_ops() const { return in_ops_; }
  // Results of ops that somebody still holds.
  std::vector<at::Tensor> alive() const;
  // What was raised in the forward where nobody may raise, such as Ctrl-C while Python was asked
  // for a place; raised once, here.
  void raise_again();
  // Why the nodes do not tell the whole forward; empty: they do.
  const std::string& refusal() const { return refusal_; }

  // The recorder of this thread; null if none is running.
  static Recorder* current();

  // Whether the nodes hold for these sizes only: TorchScript ran a part, whose questions nobody
  // hears, or a write reached others by a view that is a copy at other sizes.
  bool has_fixed_sizes() const { return has_fixed_sizes_; }

  // For the observer.
  void enter(const at::RecordFunction& function);
  void leave(const at::RecordFunction& function);

 private:
  // What a tensor shows of its memory: `views` lead from the memory's first tensor to it.
  struct Shown {
    Value value;
    const c10::StorageImpl* memory = nullptr;  // null: nothing that an op made
    int writes = 0;                            // how many the value has seen
    std::vector<ViewStep> views = {};
  };
  struct Memory {
    Value value;  // of its first tensor, as it is now
    int writes = 0;
    bool may_be_copied = false;  // an op shows it at some sizes and copies it at others
  };
  // The outermost op that runs: its tensors, by the place of the argument, the memory that it has
  // made, whether its write reaches others, and the type that its functional form gives.
  struct Running {
    bool is_noted = true;
    std::vector<std::pair<std::size_t, at::Tensor>> tensors = {};
    std::unordered_set<const c10::StorageImpl*> made = {};
    bool writes = false, reaches_others = false;
    at::ScalarType type = at::kFloat;
    std::chrono::steady_clock::time_point start = {};
  };

  void refuse(const std::string& reason);
  void refuse(const std::exception& error);
  void begin(const at::RecordFunction& function, at::ArrayRef<const c10::IValue> inputs);
  void end(const at::RecordFunction& function);
  void save_written(const at::RecordFunction& function);
  void replace_in_place(const c10::FunctionSchema& schema, at::ArrayRef<const c10::IValue> inputs);
  at::ScalarType type_of_result(const c10::OperatorHandle& functional,
                                at::ArrayRef<const c10::IValue> inputs) const;
  Argument argument(const c10::IValue& value);
  Value new_value(const at::Tensor& tensor);
  Value emit(Node node, const std::vector<Meta>& results);
  bool varies(const Node& node) const;
  bool is_number_of_constants(const Node& node, at::ArrayRef<c10::IValue> results) const;
  Value cast(Value value, const Meta& result);
  Value show(const ViewStep& step, Value source);
  Value current(Shown& self);
  void note_results(const std::vector<at::Tensor>& tensors, const std::vector<Meta>& results);
  Shown shown_by(const at::Tensor& result, const Node& node, std::size_t output,
                 const std::vector<Meta>& results);
  void note_write(const at::Tensor& tensor, Value written);

  std::vector<Node> nodes_;
  std::map<Value, at::Tensor> constants_;
  std::unordered_set<Value> varying_;  // values that depend on those of the inputs, or are random
  std::string refusal_;
  // Tensors and storages are told apart by their addresses. Weak references keep these from being
  // reused, but do not keep the memory of dead tensors.
  std::unordered_map<const c10::TensorImpl*, Shown> values_;
  std::unordered_map<const c10::StorageImpl*, Memory> memories_;  // that ops have made
  Running running_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> known_;
  std::unordered_set<const c10::TensorImpl*> given_;  // inputs and constants
  // Memory of inputs and results.
  std::unordered_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> computed_;
  std::vector<Question> questions_;
  std::map<Value, Meta> metas_;
  std::unordered_set<const c10::StorageImpl*> state_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;  // and what was there before
  OnResult on_result_;
  Where where_;
  Value count_ = 0;
  int depth_ = 0;
  std::chrono::nanoseconds in_ops_{0};
  bool has_fixed_sizes_ = false, wrote_state_ = false;
  std::exception_ptr raised_;
  std::optional<std::uint64_t> handle_;
};

}  // namespace torch_blocked::graph
