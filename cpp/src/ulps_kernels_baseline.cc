#define ZCOMM_ISA_NAMESPACE baseline
#define ZCOMM_ISA_TABLE BaselineUlpsKernels
#define ZCOMM_ISA_LANES "ulps_lanes_scalar.h"
#include "ulps_kernels_impl.h"
