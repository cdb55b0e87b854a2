# torch_package(target folder): `target` brings the headers and libraries of an installed torch
# package, whatever it was built for, and `target`_python its bindings, too. Sets torch_VERSION and
# torch_MINOR ("2.13"); both are empty if there is no torch in the folder.
#
# Torch's own CMake package is no help: that of a CUDA build stops where the CUDA toolkit is not
# installed, of which nothing here is used.
function(torch_package target folder)
  set(version "")
  set(minor "")
  if(EXISTS "${folder}/version.py")
    file(STRINGS "${folder}/version.py" version REGEX "^__version__ = ")
    string(REGEX MATCH "[0-9]+[.][0-9]+[.][0-9]+" version "${version}")
    string(REGEX MATCH "^[0-9]+[.][0-9]+" minor "${version}")
  endif()
  set(torch_VERSION "${version}" PARENT_SCOPE)
  set(torch_MINOR "${minor}" PARENT_SCOPE)
  if(NOT version OR TARGET ${target})
    return()
  endif()

  # Which of its two ABIs libstdc++ has in torch's signatures.
  file(STRINGS "${folder}/share/cmake/Torch/TorchConfig.cmake" abi
    REGEX "_GLIBCXX_USE_CXX11_ABI=[01]")
  string(REGEX MATCH "_GLIBCXX_USE_CXX11_ABI=[01]" abi "${abi}")

  set(include "${folder}/include" "${folder}/include/torch/csrc/api/include")
  add_library(${target} INTERFACE IMPORTED)
  set_target_properties(${target} PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${include}"
    INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${include}"
    INTERFACE_COMPILE_DEFINITIONS "${abi}"
    INTERFACE_LINK_LIBRARIES "${folder}/lib/libtorch_cpu.so;${folder}/lib/libc10.so")
  add_library(${target}_python INTERFACE IMPORTED)
  set_target_properties(${target}_python PROPERTIES
    INTERFACE_LINK_LIBRARIES "${folder}/lib/libtorch_python.so;${target}")
endfunction()
