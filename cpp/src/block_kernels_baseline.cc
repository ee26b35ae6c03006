#define ZCOMM_ISA_NAMESPACE baseline
#define ZCOMM_ISA_TABLE BaselineKernels
#define ZCOMM_ISA_LANES "lanes_generic.h"
#include "block_kernels_impl.h"
