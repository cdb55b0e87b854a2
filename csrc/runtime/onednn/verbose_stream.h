// Catches what torch's own oneDNN prints of the primitives that it runs. torch does not export
// oneDNN's symbols, so only its verbose mode, which torch can switch on, shows its reorders. oneDNN
// prints to C's standard output. While a stream is open, that is a file: glibc's stdout is a
// variable. oneDNN's lines are taken from the file, and all other lines are passed on.
#pragma once

#include <string>
#include <vector>

namespace torch_blocked::verbose_stream {

// Streams nest. Nothing is caught if the system gives no file.
void open();
void close();
bool is_open();
// The lines that oneDNN has printed since the last call, on any thread.
std::vector<std::string> take();

// Made while a stream is open, keeps it open: for an op, which prints when it ends.
class Hold {
 public:
  Hold();
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  ~Hold();

 private:
  bool holds_ = false;
};

}  // namespace torch_blocked::verbose_stream
