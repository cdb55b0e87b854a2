// What torch's own oneDNN prints of the primitives that it runs. Its symbols are not exported, so
// its verbose mode, which torch can switch on, is all that tells of its reorders. It prints to the
// process's standard output: while streams are open, that goes to a file, from which the lines of
// oneDNN are taken, and all others are passed on.
#pragma once

#include <string>
#include <vector>

namespace torch_blocked::verbose_stream {

// They nest. False if the system gives no file: then nothing is caught.
bool open();
void close();
bool is_open();
// The lines of oneDNN that were printed since the last call, by whatever thread.
std::vector<std::string> take();

}  // namespace torch_blocked::verbose_stream
