// What becomes of a model's constants: folded, packed and copied once, however many graphs and
// plans use them. Constants are told apart by where they lie, so the store keeps them alive.
//
// The product of a weight with the factors that were folded into it lives only while it is packed,
// so that a model's weights are there twice and not three times.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "runtime/fork.h"

namespace torch_blocked::graph {

// A layer's weight, and factors of what was folded into it. They are multiplied when it is packed:
// products that stay would be a second copy of a model's weights, 97 MiB of ResNet-50's.
struct Weight {
  at::Tensor source;
  at::Tensor factors = {};  // float64, of sizes that broadcast to the source's; undefined: none

  at::IntArrayRef sizes() const { return source.sizes(); }
  std::vector<at::Tensor> parts() const { return {source, factors}; }
  at::ScalarType dtype() const { return source.scalar_type(); }
  // source * factors, rounded once; the source itself without factors.
  at::Tensor values() const;
};

struct Folded {
  Weight weight;
  at::Tensor bias;
};

// Any thread may call.
class Weights {
 public:
  // What `others` have packed already is used; what is packed besides dies with this store.
  explicit Weights(Weights* others = nullptr) : others_(others) {}
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;
  // Plans are gone before their weights: then the system gets back what the model had.
  ~Weights();

  // In the packed form named `format`. Packed weights that stay lie one after the other in large
  // pieces of memory: whole huge pages for each would leave 14 MiB of ResNet-50's unused.
  at::Tensor packed(const std::vector<at::Tensor>& weights, const std::string& format,
                    const std::function<at::Tensor()>& pack);
  // What fold() makes of `sources`, made once; `how` names all else that decides the result.
  Folded folded(const std::vector<at::Tensor>& sources, const std::string& how,
                const std::function<Folded()>& fold);
  // A copy that later changes of the model do not reach.
  at::Tensor own(const at::Tensor& constant);

  // Notes the values of constants, or raises ValueError if they were noted before and are others.
  void check_unchanged(const std::vector<at::Tensor>& constants);
  // Lets go of all but the packed weights.
  void release();
  // Lets go of the packed weights: nothing runs that reads them.
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
  at::Tensor piece_;              // the one that is being filled, this far
  std::int64_t filled_ = 0, touched_ = 0;
};

}  // namespace torch_blocked::graph
