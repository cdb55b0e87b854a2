// Marks what the extension exports to other libraries. Everything else in it is hidden.
#pragma once

#define TORCH_BLOCKED_API __attribute__((visibility("default")))
