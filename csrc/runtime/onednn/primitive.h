// oneDNN primitives with their arguments prepared, in a bounded cache.
//
// A call on a prepared primitive costs 0.23 us. Making its descriptor again costs 4.6 us, even if
// oneDNN's own cache has the code. Each thread has its own cache and scratchpad, because concurrent
// runs can share neither memory objects nor a scratchpad. They share the generated code through
// oneDNN's cache.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <list>
#include <memory>
#include <oneapi/dnnl/dnnl.hpp>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "format/activation.h"

namespace torch_blocked {

// A primitive and one memory object per argument. Each call executes it with other buffers.
class Primitive {
 public:
  struct Argument {
    int id;  // DNNL_ARG_...
    dnnl::memory::desc md;
  };

  // The descriptor must ask for scratchpad_mode::user.
  Primitive(const dnnl::primitive& primitive, std::span<const Argument> arguments,
            const dnnl::memory::desc& scratchpad_md);

  // One buffer per argument, in the order given to the constructor.
  void execute(std::initializer_list<const void*> buffers);

 private:
  dnnl::primitive primitive_;
  std::vector<dnnl::memory> memories_;
  std::vector<dnnl_exec_arg_t> arguments_;
  std::size_t scratchpad_bytes_ = 0;
};

// The attributes of every primitive here: we provide the scratchpad.
dnnl::primitive_attr user_scratchpad();

// Whether it is one of oneDNN's slow implementations: "ref:any", "conv:any+ref:any", and
// "simple:any" for reorders.
bool is_ref(std::string_view impl_name);

// A key that tells problems apart. It starts with a name. A primitive's key ends with the thread
// count, on which oneDNN's code depends, and with whatever else decides which implementation it is
// (runtime/estimated_threads.h).
class Key {
 public:
  explicit Key(const char* name) : bytes_(name) {}
  Key& add(std::int64_t value);
  Key& add(std::span<const std::int64_t> values);
  Key& add(Format format);
  std::string finish() &&;                             // with that end
  std::string text() && { return std::move(bytes_); }  // without it

 private:
  std::string bytes_;
};

// Evicts the least recently used value. Until it is evicted, a value keeps its address.
template <typename Value>
class LruCache {
 public:
  explicit LruCache(std::size_t capacity) : capacity_(capacity) {}

  template <typename Make>
  Value& get(std::string key, Make&& make) {
    if (auto found = index_.find(key); found != index_.end()) {
      entries_.splice(entries_.begin(), entries_, found->second);
      return *found->second->value;
    }
    auto value = std::make_unique<Value>(make());
    entries_.push_front({key, std::move(value)});
    index_.emplace(std::move(key), entries_.begin());
    if (entries_.size() > capacity_) {
      index_.erase(entries_.back().key);
      entries_.pop_back();
    }
    return *entries_.front().value;
  }

 private:
  struct Entry {
    std::string key;
    std::unique_ptr<Value> value;
  };
  std::size_t capacity_;
  std::list<Entry> entries_;
  std::unordered_map<std::string, typename std::list<Entry>::iterator> index_;
};

// Enough for several large models.
inline constexpr std::size_t kPrimitiveCacheCapacity = 1024;

}  // namespace torch_blocked
