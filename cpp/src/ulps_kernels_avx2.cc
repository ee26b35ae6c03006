#define ZCOMM_ISA_NAMESPACE avx2
#define ZCOMM_ISA_TABLE Avx2UlpsKernels
#define ZCOMM_ISA_LANES "ulps_lanes_avx2.h"
#include "ulps_kernels_impl.h"
