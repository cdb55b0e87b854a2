// While someone records, reports every op that runs to trace, including ATen's. PyTorch's
// dispatcher tells observers of each call, for its profiler.
#pragma once

namespace torch_blocked {

// Calls nest. With `onednn`, also takes what torch's own oneDNN prints (verbose_stream.h), op by
// op; its verbose mode must be on.
void start_observing(bool onednn);
void stop_observing(bool onednn);

}  // namespace torch_blocked
