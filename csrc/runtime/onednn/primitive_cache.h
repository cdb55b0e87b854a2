// oneDNN's own cache of primitives, with their code.
#pragma once

namespace torch_blocked {

// Bounds it, unless the user has: whoever runs a primitive keeps it anyway, and one that was made
// for a size that never comes again holds 50 to 100 KiB of code.
void bound_primitive_cache();

// Lets go of those that nobody runs.
void forget_primitives();

}  // namespace torch_blocked
