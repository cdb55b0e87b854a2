# What a set of sources says to the compiler, as one hash: comments and the space between words do
# not count. Times that were measured with a kernel stay valid while its comments are rewritten.
#
#   source_hash(<variable> <folder>...)  of all C++ files below the folders
#   cmake -DFOLDERS="<folder>;..." -P source_hash.cmake  prints it

function(source_hash variable)
  set(hashes "")
  foreach(folder ${ARGN})
    file(GLOB_RECURSE files LIST_DIRECTORIES false RELATIVE "${folder}" "${folder}/*.h"
      "${folder}/*.cpp" "${folder}/*.inc")
    list(SORT files)
    foreach(file ${files})
      file(READ "${folder}/${file}" code)
      string(REGEX REPLACE "//[^\n]*" "" code "${code}")
      string(REGEX REPLACE "[ \t\r\n]+" " " code "${code}")
      string(STRIP "${code}" code)
      string(SHA1 hash "${code}")
      string(APPEND hashes "${file} ${hash}\n")
    endforeach()
  endforeach()
  string(SHA1 hash "${hashes}")
  set(${variable} "${hash}" PARENT_SCOPE)
endfunction()

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  source_hash(hash ${FOLDERS})
  message("${hash}")
endif()
