# Resolves ZCOMM_CUDA (AUTO | ON | OFF) to ZCOMM_CUDA_ENABLED and enables the CUDA language. Include before any target
# is created: a target takes its CUDA_ARCHITECTURES from CMAKE_CUDA_ARCHITECTURES at the moment it is added.
# ZCOMM_CUDA_SOURCES lists the .cu files, relative to cpp/.
#
# AUTO compiles them where nvcc is and a GPU is in sight, or architectures are given: they take two minutes, which nobody
# without a GPU should wait for.
#
# Architectures: those of CMAKE_CUDA_ARCHITECTURES or the environment's CUDAARCHS, if given (90 builds for an H100 alone);
# else every major one from 80 on that the compiler knows (its code runs on the minor ones, too), and PTX of the last.
set(ZCOMM_CUDA_SOURCES cuda/decode.cu cuda/quantize.cu cuda/requantize.cu cuda/ulps.cu)

set(ZCOMM_CUDA_ENABLED FALSE)
if(NOT ZCOMM_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "ZCOMM_CUDA must be AUTO, ON or OFF: ZCOMM_CUDA=${ZCOMM_CUDA}")
endif()

# No fused multiply-add, and IEEE division and denormals (nvcc's defaults, spelled out): the numerics contract's bits.
set(ZCOMM_CUDA_FLAGS -fmad=false -prec-div=true -ftz=false -Xcompiler=-Wall,-Wextra,-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=)
if(ZCOMM_WERROR)
  list(APPEND ZCOMM_CUDA_FLAGS -Werror=all-warnings -Xcompiler=-Werror)
endif()

# Sets `result` to 80, 90, ... as far as the compiler knows them.
function(zcomm_cuda_architectures result)
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-code OUTPUT_VARIABLE known ERROR_QUIET)
  string(REGEX MATCHALL "sm_[0-9]+0[^0-9a-z]" known "${known}\n")
  list(TRANSFORM known REPLACE "[^0-9]" "")
  list(FILTER known EXCLUDE REGEX "^[0-7]0$")
  list(REMOVE_DUPLICATES known)
  if(NOT known)
    set(known 80 90)
  endif()
  list(GET known -1 last)
  list(TRANSFORM known APPEND "-real")
  set(${result} ${known} ${last}-virtual PARENT_SCOPE)
endfunction()

set(ZCOMM_WANTS_CUDA FALSE)
if(ZCOMM_CUDA STREQUAL "ON")
  set(ZCOMM_WANTS_CUDA TRUE)
elseif(ZCOMM_CUDA STREQUAL "AUTO")
  if(EXISTS /dev/nvidiactl OR EXISTS /dev/dxg OR DEFINED CMAKE_CUDA_ARCHITECTURES OR DEFINED ENV{CUDAARCHS})
    set(ZCOMM_WANTS_CUDA TRUE)
  else()
    message(STATUS "zcomm: no GPU in sight; ZCOMM_CUDA=ON compiles the CUDA kernels all the same")
  endif()
endif()

if(ZCOMM_WANTS_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
      zcomm_cuda_architectures(CMAKE_CUDA_ARCHITECTURES)
    endif()
    enable_language(CUDA)
    message(STATUS "zcomm: CUDA ${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")
    set(ZCOMM_CUDA_ENABLED TRUE)
  elseif(ZCOMM_CUDA STREQUAL "ON")
    message(FATAL_ERROR "ZCOMM_CUDA=ON, but CMake found no CUDA compiler (set CUDACXX or ZCOMM_CUDA=OFF).")
  endif()
endif()
