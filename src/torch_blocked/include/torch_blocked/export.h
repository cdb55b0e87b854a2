// What the extension shows to other libraries; all else in it is hidden.
#pragma once

#define TORCH_BLOCKED_API __attribute__((visibility("default")))
