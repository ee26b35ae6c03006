// No vectors: ulps_kernels_impl.h does everything one element at a time.

constexpr bool kInterleaves = false;

inline std::size_t SymbolsOfGroup(const std::uint16_t* new_bits, const std::uint16_t* old_bits, std::uint8_t* symbols) {
  std::size_t nonzero = 0;
  for (std::size_t i = 0; i < kGroup; ++i) {
    const std::uint32_t z = Change(new_bits[i], old_bits[i]);
    symbols[i] = static_cast<std::uint8_t>(Symbol(z, kMaxDirectBits));
    nonzero += z != 0 ? 1 : 0;
  }
  return nonzero;
}

inline std::uint64_t AtLeast(const std::uint8_t* symbols, std::uint32_t least) {
  std::uint64_t mask = 0;
  for (std::size_t i = 0; i < kGroup; ++i) mask |= static_cast<std::uint64_t>(symbols[i] >= least) << i;
  return mask;
}

inline void ApplyGroup(const std::uint16_t* zs, std::uint16_t* values) {
  for (std::size_t i = 0; i < kGroup; ++i) values[i] = static_cast<std::uint16_t>(Changed(values[i], zs[i]));
}

struct Round {
  std::uint32_t* states;

  explicit Round(std::uint32_t* from) : states(from) {}
  void Save(std::uint32_t*) const {}

  std::uint8_t* Encode(const EncodeEntry* entries, std::uint8_t* words) {
    return EncodeLanes(entries, kDenseLanes, words, states);
  }

  const std::uint8_t* Decode(const std::uint32_t* slots, const std::uint8_t* words, std::uint8_t* symbols) {
    for (std::uint32_t lane = 0; lane < kDenseLanes; ++lane) {
      const std::uint32_t slot = slots[states[lane] & (kScale - 1)];
      std::uint32_t state = DecodeSymbol(states[lane], slot);
      symbols[lane] = static_cast<std::uint8_t>(slot >> 24);
      if (state < kLowestState) {
        state = state << 16 | LoadWord(words);
        words += 2;
      }
      states[lane] = state;
    }
    return words;
  }
};
