// Vectors of kLanes 32-bit lanes, with the compiler's vector extensions, and the operations that are the same at every
// ISA level. Each lanes_<level>.h includes this after it has set kLanes.

using F = float __attribute__((vector_size(4 * kLanes)));
using I = std::int32_t __attribute__((vector_size(4 * kLanes)));
using U = std::uint32_t __attribute__((vector_size(4 * kLanes)));

inline I BitsOf(F value) { return reinterpret_cast<I>(value); }
inline F FloatOf(I bits) { return reinterpret_cast<F>(bits); }
inline U Unsigned(I value) { return reinterpret_cast<U>(value); }
inline I Signed(U value) { return reinterpret_cast<I>(value); }
inline F ToFloat(I value) { return __builtin_convertvector(value, F); }
inline I Truncate(F value) { return __builtin_convertvector(value, I); }

// A table of 16 values of type Out that 4-bit codes index, on levels that look up more than kLanes codes at once.
template <class Out>
struct WordTable {
  static constexpr bool kExists = false;
};
