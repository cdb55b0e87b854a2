#include "kernels/entries.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

extern const Kernels table;
const Kernels table{
    .block_channels = block_channels,
    .unblock_channels = unblock_channels,
    .affine = affine,
    .copy_lanes = copy_lanes,
    .direct_row = direct_row,
    .direct_channels = direct_channels,
};

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
