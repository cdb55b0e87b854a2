// Records the ops that a forward calls while it runs.
//
// PyTorch's dispatcher tells observers of each call, for its profiler. The outermost calls are the
// forward in ATen's own terms: conv2d, batch_norm, relu_. Tracing by torch.export gives the same
// ops, but takes 100 MiB of Python modules and 1.5 s.
//
// The recorder knows which values vary: those that depend on values of the inputs or are random. A
// number that Python reads from a value that does not vary is the same for all inputs of the
// capture, so its op becomes no node. A number from a varying value ends the recording.
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
// ops become functional ones. After a write into memory that several tensors show, each of them is
// made anew at its next use. restore() puts back the memory of `state` and of inputs that the
// forward has written.
class Recorder {
 public:
  // Called with each tensor that an op has made, before anyone else sees it.
  using OnResult = std::function<void(const at::Tensor&)>;

  // Says where the op that now begins was called.
  using Where = std::function<Origin()>;

  // Whether a tensor of a Python class is a blocked one, or a view of one.
  using IsOwn = std::function<bool(const at::Tensor&)>;

  Recorder(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& state,
           OnResult on_result, Where where, IsOwn is_own);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  ~Recorder() { stop(); }

  // Records this thread's ops until stop().
  void start();
  void stop();
  const std::vector<Node>& nodes() const { return nodes_; }
  // Tensors that existed before: parameters, buffers and others.
  const std::map<Value, at::Tensor>& constants() const { return constants_; }
  Value value_of(const at::Tensor& tensor);
  // Notes that Python asked for sizes of a value (Question); constants always give the same answer.
  void ask(const at::Tensor& tensor, std::int64_t what, Dims answer);
  // Whether a tensor follows from constants and sizes only, so that its values are the same for all
  // inputs that give the same answers. A constant that Python reads becomes one of the capture's.
  bool is_constant(const at::Tensor& tensor);
  // Notes that Python sees the memory of a tensor, so that writes into it count as seen by others.
  void expose(const at::Tensor& tensor);
  // Like is_constant(), for the op that runs now.
  bool runs_constant_op() const;
  const std::vector<Question>& questions() const { return questions_; }
  const std::map<Value, Meta>& metas() const { return metas_; }
  void restore();
  // Whether the forward wrote memory of `state` or of inputs, even through results that ATen does
  // not call views, such as those of unsafe_chunk.
  bool wrote_state() const { return wrote_state_; }
  // The time in ops, without what Python and the recorder do between them.
  std::chrono::duration<double> seconds_in_ops() const { return in_ops_; }
  // Results of ops that somebody still holds.
  std::vector<at::Tensor> alive() const;
  // Raises, once, an error that came up where nobody may raise, such as Ctrl-C while Python was
  // asked for the origin of an op.
  void raise_again();
  // Why the nodes are not the whole forward; empty if they are.
  const std::string& refusal() const { return refusal_; }

  // The recorder of this thread; null if none is running.
  static Recorder* current();

  // Whether the nodes hold for these sizes only. Either TorchScript ran a part, and its questions
  // about sizes are not seen, or a write reached other tensors through a view that is a copy at
  // other sizes.
  bool has_fixed_sizes() const { return has_fixed_sizes_; }

  // For the observer.
  void enter(const at::RecordFunction& function);
  void leave(const at::RecordFunction& function);

 private:
  // What a tensor shows of its memory. `views` lead from the memory's first tensor to this one.
  struct Shown {
    Value value;
    const c10::StorageImpl* memory = nullptr;  // null: no op made it
    int writes = 0;                            // how many are in the value
    std::vector<ViewStep> views = {};
  };
  struct Memory {
    Value value;  // of its first tensor, as it is now
    int writes = 0;
    bool may_be_copied = false;  // an op makes a view of it at some sizes and a copy at others
  };
  // The outermost op that runs: its tensors by argument, the memory that it has made, whether its
  // write reaches other tensors, and the type of its functional form's result.
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
  bool takes_wrapper(const at::RecordFunction& function) const;
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
  std::unordered_set<Value> varying_;  // values that depend on values of inputs, or are random
  std::string refusal_;
  // Tensors and storages are identified by their addresses. Weak references keep these from being
  // reused, without keeping the memory of dead tensors.
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
  IsOwn is_own_;
  Value count_ = 0;
  int depth_ = 0;  // of ops in the outermost one
  // Running ops that count as the ops that they call.
  std::vector<const at::RecordFunction*> opened_;
  std::chrono::nanoseconds in_ops_{0};
  bool has_fixed_sizes_ = false, wrote_state_ = false;
  std::exception_ptr raised_;
  std::optional<std::uint64_t> handle_;
};

}  // namespace torch_blocked::graph
