# torch_package(folder): the targets torch_blocked::torch and torch_blocked::torch_python, and
# torch_VERSION, torch_VERSION_MAJOR, torch_VERSION_MINOR, all from the files of an installed torch
# package, whatever it was built for.
#
# Torch's own CMake package is no help: that of a CUDA build stops where the CUDA toolkit is not
# installed, of which nothing here is used.
function(torch_package folder)
  set(version "")
  if(EXISTS "${folder}/version.py")
    file(STRINGS "${folder}/version.py" version REGEX "^__version__ = ")
    string(REGEX MATCH "([0-9]+)[.]([0-9]+)[.][0-9]+" version "${version}")
  endif()
  set(torch_VERSION "${version}" PARENT_SCOPE)
  set(torch_VERSION_MAJOR "${CMAKE_MATCH_1}" PARENT_SCOPE)
  set(torch_VERSION_MINOR "${CMAKE_MATCH_2}" PARENT_SCOPE)
  if(NOT version OR TARGET torch_blocked::torch)
    return()
  endif()

  # Which of its two ABIs libstdc++ has in torch's signatures.
  set(config "${folder}/share/cmake/Torch/TorchConfig.cmake")
  file(STRINGS "${config}" abi REGEX "_GLIBCXX_USE_CXX11_ABI=[01]")
  string(REGEX MATCH "_GLIBCXX_USE_CXX11_ABI=[01]" abi "${abi}")

  add_library(torch_blocked::torch INTERFACE IMPORTED)
  set_target_properties(torch_blocked::torch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES
      "${folder}/include;${folder}/include/torch/csrc/api/include"
    INTERFACE_SYSTEM_INCLUDE_DIRECTORIES
      "${folder}/include;${folder}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_DEFINITIONS "${abi}"
    INTERFACE_LINK_LIBRARIES "${folder}/lib/libtorch_cpu.so;${folder}/lib/libc10.so")
  add_library(torch_blocked::torch_python INTERFACE IMPORTED)
  set_target_properties(torch_blocked::torch_python PROPERTIES
    INTERFACE_LINK_LIBRARIES "${folder}/lib/libtorch_python.so;torch_blocked::torch")
endfunction()
