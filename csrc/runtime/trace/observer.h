// Tells trace of every op that runs, also of those of ATen, while someone records: PyTorch tells
// observers of each call through its dispatcher, for its profiler's sake.
#pragma once

namespace torch_blocked {

// They nest. With `onednn`, what torch's own oneDNN prints is taken, too (verbose_stream.h), op by
// op; its verbose mode must be on.
void start_observing(bool onednn);
void stop_observing(bool onednn);

}  // namespace torch_blocked
