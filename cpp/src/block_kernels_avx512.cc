#define ZCOMM_ISA_NAMESPACE avx512
#define ZCOMM_ISA_TABLE Avx512Kernels
#define ZCOMM_ISA_LANES "lanes_avx512.h"
#include "block_kernels_impl.h"
