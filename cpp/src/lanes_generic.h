// No vectors by hand: the compiler's auto-vectorizer does the loops of block_kernels_impl.h (SSE2 on x86-64, NEON on
// arm64). Each *Lanes function does a prefix of its range and returns how many elements that was: here none.

// `absmax` is an OrderedMagnitude, raised to the largest of the prefix.
template <class T, class Magnitude>
inline std::size_t AbsMaxLanes(const T* /*x*/, std::size_t /*numel*/, Magnitude* /*absmax*/) {
  return 0;
}

template <class T>
inline std::size_t QuantizeInt8Lanes(const T* /*x*/, std::size_t /*numel*/, float /*inverse*/,
                                     std::uint8_t* /*codes*/) {
  return 0;
}

template <class T>
inline std::size_t QuantizeInt4Lanes(const T* /*x*/, std::size_t /*numel*/, float /*inverse*/,
                                     std::uint8_t* /*codes*/) {
  return 0;
}

template <class Out>
inline std::size_t DecodeInt8Lanes(const std::int8_t* /*codes*/, std::size_t /*numel*/, float /*scale*/,
                                   float /*limit*/, Out* /*out*/) {
  return 0;
}

template <class Out>
inline std::size_t DecodeInt4Lanes(const std::uint8_t* /*codes*/, std::size_t /*numel*/, float /*scale*/,
                                   float /*limit*/, Out* /*out*/) {
  return 0;
}

template <class In, class Out>
inline std::size_t ConvertLanes(const In* /*in*/, std::size_t /*numel*/, Out* /*out*/) {
  return 0;
}

// `out` and `in` are whole cache lines, `out` aligned to one.
inline void StreamLines(std::uint8_t* out, const std::uint8_t* in, std::size_t nbytes) { std::memcpy(out, in, nbytes); }
