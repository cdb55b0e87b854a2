# find_package(torch_blocked CONFIG): the target torch_blocked::torch_blocked with the public headers
# (torch_blocked/*.h) and torch's. Python's torch_blocked.cmake_prefix() is what to put into
# CMAKE_PREFIX_PATH; it names torch, too.
#
# A library that links to the target is loaded after `import torch_blocked`, which brings the
# extension into the process; without it the loader looks for a libtorch_blocked.so in vain.
get_filename_component(torch_blocked_ROOT "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
include("${CMAKE_CURRENT_LIST_DIR}/torch_package.cmake")

find_path(torch_blocked_TORCH_CMAKE Torch/TorchConfig.cmake PATHS ${CMAKE_PREFIX_PATH})
get_filename_component(torch_blocked_TORCH "${torch_blocked_TORCH_CMAKE}/../.." ABSOLUTE)
torch_package(torch_blocked::torch "${torch_blocked_TORCH}")

file(GLOB torch_blocked_EXTENSION "${torch_blocked_ROOT}/torch${torch_MINOR}/_C.*.so")
if(NOT torch_blocked_EXTENSION)
  set(torch_blocked_FOUND FALSE)
  set(torch_blocked_NOT_FOUND_MESSAGE
    "no extension for torch '${torch_VERSION}' in ${torch_blocked_ROOT}: build it first")
  return()
endif()
list(GET torch_blocked_EXTENSION 0 torch_blocked_EXTENSION)  # one for each Python, all alike

if(NOT TARGET torch_blocked::torch_blocked)
  add_library(torch_blocked::torch_blocked SHARED IMPORTED)
  set_target_properties(torch_blocked::torch_blocked PROPERTIES
    IMPORTED_LOCATION "${torch_blocked_EXTENSION}"
    IMPORTED_SONAME libtorch_blocked.so
    INTERFACE_INCLUDE_DIRECTORIES "${torch_blocked_ROOT}/include"
    INTERFACE_LINK_LIBRARIES torch_blocked::torch
    INTERFACE_COMPILE_FEATURES cxx_std_20)
endif()
