// While someone records, reports every op that runs to trace, including ATen's. PyTorch's
// dispatcher tells observers of each call, for its profiler.
#pragma once

namespace torch_blocked {

// Calls nest. With `onednn`, also takes what torch's own oneDNN prints (verbose_stream.h), op by
// op; its verbose mode must be on. Only an op that begins before the call and ends after
// stop_observing() may print.
void start_observing(bool onednn);
void stop_observing(bool onednn);

}  // namespace torch_blocked
