// Catches what torch's own oneDNN prints of the primitives that it runs. torch does not export
// oneDNN's symbols, so only its verbose mode, which torch can switch on, shows its reorders. oneDNN
// prints to the process's standard output. While a stream is open, the output goes to a file.
// oneDNN's lines are taken from there, and all other lines are passed on.
#pragma once

#include <string>
#include <vector>

namespace torch_blocked::verbose_stream {

// Streams nest. False if the system gives no file: then nothing is caught.
bool open();
void close();
bool is_open();
// The lines that oneDNN has printed since the last call, on any thread.
std::vector<std::string> take();

}  // namespace torch_blocked::verbose_stream
