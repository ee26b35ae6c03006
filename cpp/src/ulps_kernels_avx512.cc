#define ZCOMM_ISA_NAMESPACE avx512
#define ZCOMM_ISA_TABLE Avx512UlpsKernels
#define ZCOMM_ISA_LANES "ulps_lanes_avx512.h"
#include "ulps_kernels_impl.h"
