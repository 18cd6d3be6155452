// 2:4 products, for any vector type S. Included once by each instruction set's unit.
//   S::R, S::I    LANES floats, LANES words        S::X        four floats, repeated
// No horizontal sums anywhere: lanes are output rows (decode) or samples (batch).

template <bool BF16>
static inline void weights(const char* block, int j, int at, S::R& first, S::R& second) {
  if constexpr (BF16) {
    const S::I pair = S::load_i(block + 64 + (j * kRows + at) * 4);
    first = S::low(pair), second = S::high(pair);
  } else {
    const float* values = reinterpret_cast<const float*>(block + 64) + 2 * j * kRows + at;
    first = S::load(values), second = S::load(values + kRows);
  }
}

// MR samples, VN vectors of output rows. CH independent sums hide the latency of the multiply-add.
template <int MR, int VN, bool BF16>
static void decode_rows(const char* tile, int at, const float* x, int64_t blocks, float* out) {
  constexpr int CH = MR * VN == 1 ? 4 : MR * VN <= 4 ? 2 : 1;
  constexpr int64_t step = BF16 ? kBlockBf16 : kBlockF32;
  S::R sum[MR][VN][CH];
  for (auto& a : sum)
    for (auto& b : a)
      for (auto& c : b) c = S::zero();
  for (int64_t b = 0; b < blocks; ++b, tile += step) {
    S::prefetch(tile + 2048);
    S::I p0[VN], p1[VN];
    for (int v = 0; v < VN; ++v) p0[v] = S::load_i(tile + (at + v * S::LANES) * 4), p1[v] = S::right(p0[v], 16);
#pragma GCC unroll 8
    for (int j = 0; j < kGroups; ++j) {
      if (j % 2 == 0) S::prefetch(tile + 2048 + j * (BF16 ? 64 : 128)), S::prefetch(tile + 2112 + j * 128);
      S::R w0[VN], w1[VN];
#pragma GCC unroll 4
      for (int v = 0; v < VN; ++v) weights<BF16>(tile, j, at + v * S::LANES, w0[v], w1[v]);
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m) {
        const S::X four = S::four(x + m * blocks * kCols + b * kCols + 4 * j);
#pragma GCC unroll 4
        for (int v = 0; v < VN; ++v) {
          S::R& even = sum[m][v][2 * j % CH];
          even = S::fma(w0[v], S::pick(four, p0[v]), even);
          S::R& odd = sum[m][v][(2 * j + 1) % CH];
          odd = S::fma(w1[v], S::pick(four, p1[v]), odd);
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < VN; ++v) p0[v] = S::right(p0[v], 2), p1[v] = S::right(p1[v], 2);
    }
  }
  for (int m = 0; m < MR; ++m)
    for (int v = 0; v < VN; ++v) {
      for (int c = 1; c < CH; ++c) sum[m][v][0] = S::add(sum[m][v][0], sum[m][v][c]);
      S::store(out + m * kRows + at + v * S::LANES, sum[m][v][0]);
    }
}

static inline float widen(uint16_t half) {
  const uint32_t word = uint32_t(half) << 16;
  float value;
  __builtin_memcpy(&value, &word, 4);
  return value;
}

static inline uint16_t narrow(float value) {  // to nearest, ties to even; NaN stays NaN
  uint32_t word;
  __builtin_memcpy(&word, &value, 4);
  if ((word & 0x7fffffff) > 0x7f800000) return uint16_t((word >> 16) | 0x40);
  return uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

// 16 sums of one sample, plus bias, to y[sample, row...].
static inline void put(const Linear& a, int64_t sample, int64_t row, const float* sums) {
  const int count = a.n - row < kRows ? int(a.n - row) : kRows;
  const int64_t at = sample * a.n + row;
  if (a.bf16) {
    const uint16_t* bias = static_cast<const uint16_t*>(a.bias);
    uint16_t* y = static_cast<uint16_t*>(a.y) + at;
    for (int r = 0; r < count; ++r) y[r] = narrow(bias ? sums[r] + widen(bias[row + r]) : sums[r]);
  } else {
    const float* bias = static_cast<const float*>(a.bias);
    float* y = static_cast<float*>(a.y) + at;
    for (int r = 0; r < count; ++r) y[r] = bias ? sums[r] + bias[row + r] : sums[r];
  }
}

template <int MR, bool BF16>
static void decode_m(const Linear& a) {
  constexpr int VECTORS = kRows / S::LANES, VN = VECTORS == 1 ? 1 : MR <= 2 && VECTORS == 2 ? 2 : 1;
  const int64_t tile = a.blocks * (BF16 ? kBlockBf16 : kBlockF32);
  for (int64_t t = a.first; t < a.last; ++t) {
    float sums[MR * kRows];
    for (int v = 0; v < VECTORS; v += VN)
      decode_rows<MR, VN, BF16>(a.tiles + t * tile, v * S::LANES, static_cast<const float*>(a.x), a.blocks, sums);
    for (int m = 0; m < MR; ++m) put(a, m, t * kRows, sums + m * kRows);
  }
}

template <bool BF16>
static void decode_any(const Linear& a) {
  switch (a.m) {
    case 1: return decode_m<1, BF16>(a);
    case 2: return decode_m<2, BF16>(a);
    case 3: return decode_m<3, BF16>(a);
    case 4: return decode_m<4, BF16>(a);
    case 5: return decode_m<5, BF16>(a);
    case 6: return decode_m<6, BF16>(a);
    case 7: return decode_m<7, BF16>(a);
    default: return decode_m<8, BF16>(a);
  }
}

// Rows of the weight taken together, so that enough sums are under way to hide the latency of the multiply-add.
template <int W>
constexpr int rows_at_once() {
  return S::LANES == 1 || W / S::LANES >= 8 ? 1 : W / S::LANES == 4 ? 2 : 4;
}

// Rows [r, r + NR) of a tile, `blocks` blocks of it, times W samples: sums[row][W] += w * x. x is [k][W].
template <int W, bool BF16>
static inline void batch_rows(const char* block, int r, const float* x, int64_t blocks, bool fresh, float* sums) {
  constexpr int V = W / S::LANES, NR = rows_at_once<W>();
  S::R sum[NR][V];
  for (int i = 0; i < NR; ++i)
    for (int v = 0; v < V; ++v) sum[i][v] = fresh ? S::zero() : S::load(sums + i * W + v * S::LANES);
  for (int64_t b = 0; b < blocks; ++b, block += BF16 ? kBlockBf16 : kBlockF32, x += kCols * W) {
    uint32_t places[NR];
    __builtin_memcpy(places, block + 4 * r, 4 * NR);
#pragma GCC unroll 8
    for (int j = 0; j < kGroups; ++j) {
#pragma GCC unroll 4
      for (int i = 0; i < NR; ++i) {
        float w0, w1;
        if constexpr (BF16) {
          uint32_t pair, high;
          __builtin_memcpy(&pair, block + 64 + (j * kRows + r + i) * 4, 4);
          high = pair & 0xffff0000u, pair <<= 16;
          __builtin_memcpy(&w0, &pair, 4), __builtin_memcpy(&w1, &high, 4);
        } else {
          const float* values = reinterpret_cast<const float*>(block + 64) + 2 * j * kRows + r + i;
          w0 = values[0], w1 = values[kRows];
        }
        const float* x0 = x + (4 * j + ((places[i] >> (2 * j)) & 3)) * W;
        const float* x1 = x + (4 * j + ((places[i] >> (16 + 2 * j)) & 3)) * W;
        const S::R a0 = S::set(w0), a1 = S::set(w1);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sum[i][v] = S::fma(a0, S::load(x0 + v * S::LANES), sum[i][v]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sum[i][v] = S::fma(a1, S::load(x1 + v * S::LANES), sum[i][v]);
      }
    }
  }
  for (int i = 0; i < NR; ++i)
    for (int v = 0; v < V; ++v) S::store(sums + i * W + v * S::LANES, sum[i][v]);
}

template <bool BF16>
struct Widened {  // bfloat16 weights or float ones, samples in float
  static constexpr int64_t kBlock = BF16 ? kBlockBf16 : kBlockF32, kWords = kCols;
  template <int W>
  static inline void rows(const char* block, int r, const float* x, int64_t blocks, bool fresh, float* sums) {
    batch_rows<W, BF16>(block, r, x, blocks, fresh, sums);
  }
};

// Samples [done, done + W) times the tiles [t0, t1); x is [words of all blocks][W].
template <int W, class Form>
static void batch_panel(const Linear& a, int64_t t0, int64_t t1, const float* x, int64_t done) {
  const int64_t in_cache = 24576 / (Form::kWords * W * 4), step = in_cache < 1 ? 1 : in_cache;
  for (int64_t b = 0; b < a.blocks; b += step) {
    const int64_t some = a.blocks - b < step ? a.blocks - b : step;
    for (int64_t t = t0; t < t1; ++t) {
      const char* block = a.tiles + (t * a.blocks + b) * Form::kBlock;
      float* sums = a.scratch + (t - t0) * kRows * W;
      for (int r = 0; r < kRows; r += rows_at_once<W>())
        Form::template rows<W>(block, r, x + b * Form::kWords * W, some, b == 0, sums + r * W);
    }
  }
  const int64_t count = a.m - done < W ? a.m - done : W;
  for (int64_t t = t0; t < t1; ++t)
    for (int64_t i = 0; i < count; ++i) {
      float sums[kRows];
      for (int r = 0; r < kRows; r += S::LANES)
        S::store(sums + r, S::gather(a.scratch + ((t - t0) * kRows + r) * W + i, W));
      put(a, done + i, t * kRows, sums);
    }
}

template <class Form>
static void batch_any(const Linear& a) {
  for (int64_t t0 = a.first; t0 < a.last; t0 += kPanel) {
    const int64_t t1 = a.last - t0 < kPanel ? a.last : t0 + kPanel;
    const float* x = static_cast<const float*>(a.x);
    for (int64_t done = 0; done < a.m;) {
      const int w = width(a.m - done);
      if (w == 64) batch_panel<64, Form>(a, t0, t1, x, done);
      else if (w == 32) batch_panel<32, Form>(a, t0, t1, x, done);
      else batch_panel<16, Form>(a, t0, t1, x, done);
      done += w, x += a.blocks * Form::kWords * w;
    }
  }
}

// x (m, k) float -> [samples / w][32 * blocks][w]; samples beyond m repeat the last, columns beyond k are zero.
static void pack(const void* from, int64_t m, int64_t k, int64_t stride, int64_t blocks, void* to) {
  const float* x = static_cast<const float*>(from);
  float* out = static_cast<float*>(to);
  for (int64_t done = 0; done < m;) {
    const int w = width(m - done);
    for (int64_t i = 0; i < w; i += S::LANES) {
      const bool whole = done + i + S::LANES <= m;
      for (int64_t c = 0; c < blocks * kCols; ++c) {
        float* at = out + c * w + i;
        if (c >= k) S::store(at, S::zero());
        else if (whole) S::store(at, S::gather(x + (done + i) * stride + c, stride));
        else
          for (int l = 0; l < S::LANES; ++l) at[l] = x[(done + i + l < m ? done + i + l : m - 1) * stride + c];
      }
    }
    out += blocks * kCols * w, done += w;
  }
}
