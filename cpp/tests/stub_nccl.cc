// A library that looks to the loader like NCCL of version STUB_VERSION. STUB_LACKS_SEND: without ncclSend.
// STUB_HAS_REGISTRATION: with the functions that 2.19 introduced.

#define STUB(name) \
  extern "C" __attribute__((visibility("default"))) int name() { return 0; }

extern "C" __attribute__((visibility("default"))) int ncclGetVersion(int* version) {
  *version = STUB_VERSION;
  return 0;
}

STUB(ncclGetUniqueId)
STUB(ncclGetErrorString)
STUB(ncclGetLastError)
STUB(ncclCommInitRankConfig)
STUB(ncclCommFinalize)
STUB(ncclCommDestroy)
STUB(ncclCommAbort)
STUB(ncclCommGetAsyncError)
STUB(ncclGroupStart)
STUB(ncclGroupEnd)
STUB(ncclAllGather)
STUB(ncclRecv)
#ifndef STUB_LACKS_SEND
STUB(ncclSend)
#endif
#if STUB_VERSION >= 21800
STUB(ncclCommSplit)
#endif
#ifdef STUB_HAS_REGISTRATION
STUB(ncclMemAlloc)
STUB(ncclMemFree)
STUB(ncclCommRegister)
STUB(ncclCommDeregister)
#endif
