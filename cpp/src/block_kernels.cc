#include "block_kernels.h"

namespace zcomm {

const BlockKernels& ActiveKernels() {
#ifdef ZCOMM_X86
  static const BlockKernels& active = ActiveIsa() == Isa::kAvx512 ? Avx512Kernels()
                                      : ActiveIsa() == Isa::kAvx2 ? Avx2Kernels()
                                                                  : BaselineKernels();
  return active;
#else
  return BaselineKernels();
#endif
}

}  // namespace zcomm
