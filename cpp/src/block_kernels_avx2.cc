#define ZCOMM_ISA_NAMESPACE avx2
#define ZCOMM_ISA_TABLE Avx2Kernels
#define ZCOMM_ISA_LANES "lanes_avx2.h"
#include "block_kernels_impl.h"
