// Bounds oneDNN's own cache of primitives and their code.
#pragma once

namespace torch_blocked {

// Bounds the cache, unless the user has. Whoever runs a primitive keeps it alive anyway, and one
// for a size that never comes again holds 50 to 100 KiB of code.
void bound_primitive_cache();

// Drops primitives that nobody runs.
void forget_primitives();

}  // namespace torch_blocked
