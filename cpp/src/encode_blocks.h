// The loop that quantizes blocks.

// Quantization makes two passes over a tile of a few blocks in the first-level cache, and prefetches the elements two
// tiles ahead: otherwise the memory would be idle during the second pass (1.3 times faster on large arrays). One tile
// ahead is too late: the first pass waits for the last lines (0.8 times as fast for float32).
constexpr std::size_t kQuantizeTileNbytes = 4096;
constexpr std::size_t kPrefetchNbytes = 2 * kQuantizeTileNbytes;

inline void Prefetch(const void* data, std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; i += 64) __builtin_prefetch(static_cast<const std::uint8_t*>(data) + i);
}

// Encodes kEncodeVectors vectors of elements.
template <Codec kCodec, bool kRandom, class T>
inline void EncodeVectors(const Encoder<kCodec>& encoder, const T* x, const float* uniform, std::uint8_t* codes) {
  I lanes[kEncodeVectors];
  for (std::size_t j = 0; j < kEncodeVectors; ++j) {
    if constexpr (kRandom) {
      lanes[j] = encoder.RandomCodes(Load(x + j * kLanes), Load(uniform + j * kLanes));
    } else {
      lanes[j] = encoder.Codes(Load(x + j * kLanes));
    }
  }
  if constexpr (kCodeBits<kCodec> == 8) {
    StoreBytes(codes, lanes);
  } else {
    StoreNibbles(codes, lanes);
  }
}

// Encodes fewer elements than that; if their number is odd, the last byte's other nibble is 0.
template <Codec kCodec, bool kRandom, class T>
inline void EncodeRest(const Encoder<kCodec>& encoder, const T* x, const float* uniform, std::size_t numel,
                       std::uint8_t* codes) {
  constexpr std::size_t kGroup = kEncodeVectors * kLanes;
  T padded_x[kGroup] = {};
  float padded_uniform[kGroup] = {};
  std::uint8_t padded_codes[NumBytes<kCodec>(kGroup)];
  std::memcpy(padded_x, x, numel * sizeof(T));
  if constexpr (kRandom) std::memcpy(padded_uniform, uniform, numel * sizeof(float));
  EncodeVectors<kCodec, kRandom>(encoder, padded_x, padded_uniform, padded_codes);
  if (kCodeBits<kCodec> == 4 && numel % 2 != 0) padded_codes[numel / 2] &= 0x0F;
  std::memcpy(codes, padded_codes, NumBytes<kCodec>(numel));
}

template <Codec kCodec, bool kRandom, class T>
inline void EncodeBlock(const Encoder<kCodec>& encoder, const T* x, const float* uniform, std::size_t numel,
                        std::uint8_t* codes) {
  constexpr std::size_t kGroup = kEncodeVectors * kLanes;
  const auto from = [uniform](std::size_t at) { return kRandom ? uniform + at : nullptr; };  // null stays null
  std::size_t i = 0;
  for (; i + kGroup <= numel; i += kGroup) {
    EncodeVectors<kCodec, kRandom>(encoder, x + i, from(i), codes + NumBytes<kCodec>(i));
  }
  if (i < numel) EncodeRest<kCodec, kRandom>(encoder, x + i, from(i), numel - i, codes + NumBytes<kCodec>(i));
}

// Computes the scales of the `count` blocks of a tile, and writes their headers.
template <Codec kCodec, class T>
inline void ScaleTile(const T* x, std::size_t numel, std::size_t block, std::size_t count, TileScales* scales,
                      std::uint8_t* headers) {
  constexpr auto kQMax = static_cast<float>(QMax(kCodec));
  std::int32_t high[kMaxBlocks];
  if constexpr (kHasZeroPoint<kCodec>) {
    std::int32_t low[kMaxBlocks];
    for (std::size_t i = 0; i < count; ++i) Extremes(x + i * block, Min(block, numel - i * block), &low[i], &high[i]);
    ComputeScalesAndZeros(low, high, count, kQMax, scales);
    std::memcpy(headers, scales->headers, count * kHeaderNbytes<kCodec>);
  } else {
    for (std::size_t i = 0; i < count; ++i) high[i] = AbsMaxBits(x + i * block, Min(block, numel - i * block));
    ComputeScales(high, count, kQMax, scales);
    std::uint16_t narrow[kMaxBlocks];
    for (std::size_t i = 0; i < count; ++i) narrow[i] = static_cast<std::uint16_t>(scales->headers[i]);
    std::memcpy(headers, narrow, count * kHeaderNbytes<kCodec>);
  }
}

template <Codec kCodec, bool kRandom, class T>
inline void EncodeBlocks(const T* x, const float* uniform, std::size_t numel, std::size_t block, std::uint8_t* headers,
                         std::uint8_t* codes) {
  const std::size_t num_blocks = (numel + block - 1) / block;
  constexpr std::size_t kTile = kQuantizeTileNbytes / sizeof(T);
  const std::size_t blocks_per_tile = block < kTile ? Min(kMaxBlocks, kTile / block) : 1;
  TileScales scales;
  for (std::size_t first = 0; first < num_blocks; first += blocks_per_tile) {
    const std::size_t count = Min(blocks_per_tile, num_blocks - first);
    const std::size_t tile = first * block;
    ScaleTile<kCodec>(x + tile, numel - tile, block, count, &scales, headers + first * kHeaderNbytes<kCodec>);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t begin = tile + i * block;
      const std::size_t block_numel = Min(block, numel - begin);
      const std::size_t ahead = begin + kPrefetchNbytes / sizeof(T);
      if (ahead < numel) Prefetch(x + ahead, Min(block, numel - ahead) * sizeof(T));
      std::uint8_t* block_codes = codes + NumBytes<kCodec>(begin);
      if (scales.are_finite[i] == 0) {
        std::memset(block_codes, 0, NumBytes<kCodec>(block_numel));
      } else {
        EncodeBlock<kCodec, kRandom>(Encoder<kCodec>(scales, i), x + begin, kRandom ? uniform + begin : nullptr,
                                     block_numel, block_codes);
      }
    }
  }
}

template <Codec kCodec, class T>
void Quantize(const void* x, std::size_t numel, std::size_t block, std::uint8_t* headers, std::uint8_t* codes) {
  EncodeBlocks<kCodec, false>(static_cast<const T*>(x), static_cast<const float*>(nullptr), numel, block, headers,
                              codes);
}

template <Codec kCodec>
void QuantizeAtRandom(const float* x, const float* uniform, std::size_t numel, std::size_t block, std::uint8_t* headers,
                      std::uint8_t* codes) {
  EncodeBlocks<kCodec, true>(x, uniform, numel, block, headers, codes);
}
