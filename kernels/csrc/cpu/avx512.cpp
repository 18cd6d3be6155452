// AVX-512 with BW, VL and BF16.
#include "asp_cpu.h"
#if defined(__x86_64__)
#include <immintrin.h>

namespace asp {
namespace {
inline __m512i strides(int64_t s) {
  return _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                            _mm512_set1_epi32(int(s)));
}

struct S {
  static constexpr int LANES = 16;
  using R = __m512;
  using I = __m512i;
  using X = __m512;
  static R zero() { return _mm512_setzero_ps(); }
  static R load(const float* p) { return _mm512_loadu_ps(p); }
  static I load_i(const void* p) { return _mm512_loadu_si512(p); }
  static void store(float* p, R a) { _mm512_storeu_ps(p, a); }
  static R set(float a) { return _mm512_set1_ps(a); }
  static R add(R a, R b) { return _mm512_add_ps(a, b); }
  static R fma(R a, R b, R c) { return _mm512_fmadd_ps(a, b, c); }
  static I right(I a, int by) { return _mm512_srli_epi32(a, by); }
  static R low(I a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
  static R high(I a) { return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32(int(0xffff0000u)))); }
  static X four(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }
  static R pick(X x, I places) { return _mm512_permutevar_ps(x, places); }
  static R gather(const float* p, int64_t s) { return _mm512_i32gather_ps(strides(s), p, 4); }
  static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
};
#include "linear_24.inl"
#include "mask.inl"

// bfloat16: a group's four samples repeated eight times, so that only the two low bits of an index matter.
template <int MR>
void decode_dots(const Linear& a) {
  constexpr int CH = MR == 1 ? 4 : MR <= 3 ? 2 : 1;
  const uint16_t* x = static_cast<const uint16_t*>(a.x);
  const int64_t stride = a.blocks * kCols;
  for (int64_t t = a.first; t < a.last; ++t) {
    const char* block = a.tiles + t * a.blocks * kBlockBf16;
    __m512 sum[MR][CH];
    for (auto& s : sum)
      for (auto& c : s) c = _mm512_setzero_ps();
    for (int64_t b = 0; b < a.blocks; ++b, block += kBlockBf16) {
      __m512i places = _mm512_loadu_si512(block);
      S::prefetch(block + 4096);
#pragma GCC unroll 8
      for (int j = 0; j < kGroups; ++j) {
        S::prefetch(block + 4160 + 64 * j);
        const __m512i pair = _mm512_loadu_si512(block + 64 + 64 * j);
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) {
          long long four;
          __builtin_memcpy(&four, x + m * stride + b * kCols + 4 * j, 8);
          const __m512i picked = _mm512_permutexvar_epi16(places, _mm512_set1_epi64(four));
          sum[m][j % CH] = _mm512_dpbf16_ps(sum[m][j % CH], (__m512bh)pair, (__m512bh)picked);
        }
        places = _mm512_srli_epi16(places, 2);
      }
    }
    for (int m = 0; m < MR; ++m) {
      float sums[kRows];
      for (int c = 1; c < CH; ++c) sum[m][0] = _mm512_add_ps(sum[m][0], sum[m][c]);
      _mm512_storeu_ps(sums, sum[m][0]);
      put(a, m, t * kRows, sums);
    }
  }
}

void decode(const Linear& a) {
  if (!a.bf16) return decode_any<false>(a);
  switch (a.m) {
    case 1: return decode_dots<1>(a);
    case 2: return decode_dots<2>(a);
    case 3: return decode_dots<3>(a);
    case 4: return decode_dots<4>(a);
    case 5: return decode_dots<5>(a);
    case 6: return decode_dots<6>(a);
    case 7: return decode_dots<7>(a);
    default: return decode_dots<8>(a);
  }
}

// Samples as pairs: of a group's columns (c0, c1), c0 < c1, pair 2 * c0 + c1 - 1 holds both, W words a pair.
struct Dots {
  static constexpr int64_t kBlock = kBlockBf16, kWords = kGroups * kSlots;
  template <int W>
  static inline void rows(const char* block, int r, const float* x, int64_t blocks, bool fresh, float* sums) {
    constexpr int V = W / 16, NR = rows_at_once<W>();
    __m512 sum[NR][V];
    for (int i = 0; i < NR; ++i)
      for (int v = 0; v < V; ++v) sum[i][v] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + i * W + 16 * v);
    for (int64_t b = 0; b < blocks; ++b, block += kBlockBf16, x += kWords * W) {
      uint32_t places[NR];
      __builtin_memcpy(places, block + 4 * r, 4 * NR);
#pragma GCC unroll 8
      for (int j = 0; j < kGroups; ++j) {
#pragma GCC unroll 4
        for (int i = 0; i < NR; ++i) {
          int pair;
          __builtin_memcpy(&pair, block + 64 + (j * kRows + r + i) * 4, 4);
          const uint32_t slot = 2 * ((places[i] >> (2 * j)) & 3) + ((places[i] >> (16 + 2 * j)) & 3);
          const float* at = x + (j * kSlots - 1 + int64_t(slot)) * W;
          const __m512bh w = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v)
            sum[i][v] = _mm512_dpbf16_ps(sum[i][v], w, (__m512bh)_mm512_loadu_si512(at + 16 * v));
        }
      }
    }
    for (int i = 0; i < NR; ++i)
      for (int v = 0; v < V; ++v) _mm512_storeu_ps(sums + i * W + 16 * v, sum[i][v]);
  }
};

void batch(const Linear& a) { a.bf16 ? batch_any<Dots>(a) : batch_any<Widened<false>>(a); }

// x (m, k) bfloat16 -> [samples / w][group][pair][w].
void pack_pairs(const void* from, int64_t m, int64_t k, int64_t stride, int64_t blocks, void* to) {
  const uint16_t* x = static_cast<const uint16_t*>(from);
  uint32_t* out = static_cast<uint32_t*>(to);
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000u)), lower = _mm512_set1_epi32(0xffff);
  for (int64_t done = 0; done < m;) {
    const int w = width(m - done);
    for (int64_t i = 0; i < w; i += 16)
      for (int64_t g = 0; g < blocks * kGroups; ++g) {
        __m512i a = _mm512_setzero_si512(), b = a;
        if (4 * g < k) {
          uint32_t first[16], second[16];
          for (int l = 0; l < 16; ++l) {
            const uint16_t* at = x + (done + i + l < m ? done + i + l : m - 1) * stride + 4 * g;
            __builtin_memcpy(first + l, at, 4), __builtin_memcpy(second + l, at + 2, 4);
          }
          a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
        }
        uint32_t* at = out + g * kSlots * w + i;
        const __m512i a0 = _mm512_and_si512(a, lower), a1 = _mm512_srli_epi32(a, 16);
        const __m512i b0 = _mm512_slli_epi32(b, 16), b1 = _mm512_and_si512(b, upper);
        _mm512_storeu_si512(at, a);
        _mm512_storeu_si512(at + w, _mm512_or_si512(a0, b0));
        _mm512_storeu_si512(at + 2 * w, _mm512_or_si512(a0, b1));
        _mm512_storeu_si512(at + 3 * w, _mm512_or_si512(a1, b0));
        _mm512_storeu_si512(at + 4 * w, _mm512_or_si512(a1, b1));
        _mm512_storeu_si512(at + 6 * w, b);
      }
    out += blocks * kGroups * kSlots * w, done += w;
  }
}

inline __m512i keys(const void* scores, int bytes, int64_t at) {
  __m512i bits, magnitude;
  if (bytes == 4) {
    bits = _mm512_loadu_si512(static_cast<const char*>(scores) + 4 * at);
    magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  } else {
    const void* from = static_cast<const char*>(scores) + 2 * at;
    bits = _mm512_cvtepi16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
    magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fff));
  }
  const __m512i sign = _mm512_srai_epi32(bits, 31);
  return _mm512_sub_epi32(_mm512_xor_si512(magnitude, sign), sign);
}

// Lane i meets lane (i + d) % 4; where that is a lower one, a tie beats it too: k - 1 < other.
template <int ORDER, int LOWER>
inline unsigned beats(__m512i k) {
  const __m512i bar = _mm512_mask_sub_epi32(k, LOWER, k, _mm512_set1_epi32(1));
  return _mm512_cmpgt_epi32_mask(_mm512_shuffle_epi32(k, (_MM_PERM_ENUM)ORDER), bar);
}

template <int N>
int64_t mask4(const void* scores, int bytes, uint8_t* out, int64_t groups) {
  int64_t g = 0;
  for (; g + 4 <= groups; g += 4) {
    const __m512i k = keys(scores, bytes, 4 * g);
    const unsigned m1 = beats<0x39, 0x8888>(k);
    const unsigned m2 = beats<0x4e, 0xcccc>(k);
    const unsigned m3 = beats<0x93, 0xeeee>(k);
    const unsigned lost = N == 1 ? m1 | m2 | m3 : N == 2 ? (m1 & m2) | (m3 & (m1 | m2)) : m1 & m2 & m3;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 4 * g), _mm_maskz_set1_epi8(__mmask16(~lost), 1));
  }
  return g;
}

template <int M>  // a power of two, at most 16
int64_t mask_lanes(const void* scores, int bytes, uint8_t* out, int64_t groups, int n) {
  constexpr int G = 16 / M;
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i one = _mm512_set1_epi32(1), inside = _mm512_set1_epi32(M - 1);
  int64_t g = 0;
  for (; g + G <= groups; g += G) {
    const __m512i k = keys(scores, bytes, M * g), less = _mm512_sub_epi32(k, one);
    __m512i beaten = _mm512_setzero_si512();
#pragma GCC unroll 15
    for (int d = 1; d < M; ++d) {
      const __m512i to = _mm512_or_si512(_mm512_andnot_si512(inside, lane),
                                         _mm512_and_si512(inside, _mm512_add_epi32(lane, _mm512_set1_epi32(d))));
      const unsigned wraps = ((1u << M) - 1) & ~((1u << (M - d)) - 1);  // in each group
      const unsigned groups_of = M == 2 ? 0x5555 : M == 8 ? 0x101 : 1;
      const __m512i bar = _mm512_mask_blend_epi32(__mmask16(wraps * groups_of), k, less);
      const __mmask16 beats = _mm512_cmpgt_epi32_mask(_mm512_permutexvar_epi32(to, k), bar);
      beaten = _mm512_mask_add_epi32(beaten, beats, beaten, one);
    }
    const __mmask16 kept = _mm512_cmplt_epi32_mask(beaten, _mm512_set1_epi32(n));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + M * g), _mm_maskz_set1_epi8(kept, 1));
  }
  return g;
}

void mask(const void* scores, int bytes, uint8_t* out, int64_t groups, int n, int m) {
  int64_t done = 0;
  if (m == 2) done = mask_lanes<2>(scores, bytes, out, groups, n);
  if (m == 8) done = mask_lanes<8>(scores, bytes, out, groups, n);
  if (m == 16) done = mask_lanes<16>(scores, bytes, out, groups, n);
  if (m == 4 && n == 1) done = mask4<1>(scores, bytes, out, groups);
  if (m == 4 && n == 2) done = mask4<2>(scores, bytes, out, groups);
  if (m == 4 && n == 3) done = mask4<3>(scores, bytes, out, groups);
  mask_any(scores, bytes, out, done, groups, n, m);
}
}  // namespace

const Kernels kAvx512 = {decode, batch, pack, pack_pairs, mask, true};
}  // namespace asp
#endif
