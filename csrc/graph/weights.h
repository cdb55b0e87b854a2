// A store of a model's constants: each is folded, packed and copied once, however many graphs and
// plans use it. The store identifies constants by their addresses, so it keeps them alive.
//
// The product of a weight and the factors folded into it lives only during packing, so that a
// model's weights exist twice and not three times.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "runtime/fork.h"

namespace torch_blocked::graph {

// A layer's weight, and the factors that were folded into it. They are multiplied during packing:
// keeping the products would be a second copy of a model's weights, 97 MiB for ResNet-50.
struct Weight {
  at::Tensor source;
  at::Tensor factors = {};  // float64, broadcast to the source's sizes; undefined: none
  std::optional<at::ScalarType> narrowed = {};  // the type of the values; none: the source's

  at::IntArrayRef sizes() const { return source.sizes(); }
  std::vector<at::Tensor> parts() const { return {source, factors}; }
  at::ScalarType dtype() const { return narrowed.value_or(source.scalar_type()); }
  Weight with(at::Tensor other_factors) const { return {source, other_factors, narrowed}; }
  // source * factors in dtype(), rounded once; the source itself if that is the same.
  at::Tensor values() const;
};

// Drops a tensor's memory. Its sizes and type stay: they tell how packed weights lie.
void drop_memory(at::Tensor& tensor);

struct Folded {
  Weight weight;
  at::Tensor bias;
};

// Any thread may call.
class Weights {
 public:
  // Uses what `others` has already packed. What this store packs itself dies with it.
  explicit Weights(Weights* others = nullptr) : others_(others) {}
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;
  // Plans are destroyed before their weights, so here the system gets the model's memory back.
  ~Weights();

  // The weights in the packed form named `format`. Packed weights that stay share large pieces of
  // memory: whole huge pages for each would leave 14 MiB of ResNet-50's unused.
  at::Tensor packed(const std::vector<at::Tensor>& weights, const std::string& format,
                    const std::function<at::Tensor()>& pack);
  // What fold() makes of `sources`, made once. `how` names everything else that decides the result.
  Folded folded(const std::vector<at::Tensor>& sources, const std::string& how,
                const std::function<Folded()>& fold);
  // A copy that does not follow later changes of the model.
  at::Tensor own(const at::Tensor& constant);

  // Notes the values of constants. Raises ValueError if they have changed since they were noted.
  void check_unchanged(const std::vector<at::Tensor>& constants);
  // Drops everything except the packed weights.
  void release();
  // Drops the packed weights. Nothing that reads them may run any more.
  void drop_packed();
  std::int64_t packed_bytes();

 private:
  struct Noted {
    at::Tensor constant;
    std::uint64_t hash;
  };
  at::Tensor take(std::int64_t bytes);
  at::Tensor packed_here(const std::function<at::Tensor()>& pack);
  at::Tensor find_packed(const std::string& key);
  void renew();

  Weights* others_;
  ForkMutex mutex_{[this] { renew(); }};
  std::map<std::string, at::Tensor> packed_;
  std::map<std::string, Folded> folded_;
  std::map<std::string, at::Tensor> own_;
  std::map<std::string, Noted> noted_;
  std::vector<at::Tensor> kept_;  // so that no other constant gets the address of one in a key
  at::Tensor piece_;              // the piece being filled, up to filled_
  std::int64_t filled_ = 0, touched_ = 0;
};

}  // namespace torch_blocked::graph
